"""Captured decode steps with a backend that only replays: equal tokens, and padding that touches the sinks alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from baltoro.engine.batch import num_pages
from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.engine.graphs import DecodeGraphs, Step, padded_sizes
from baltoro.errors import ConfigError
from baltoro.model.build import new_model
from baltoro.model.decoder import K3Model
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from tests.engine.stub import run, submit, tokens_of
from tests.model.adapters import random_adapter
from tests.tiny import tiny_k3

PROMPTS = ((1,), (5, 9, 2, 7, 3), tuple(range(30)), (8, 8), (4, 100, 17))


class FakeBackend:
    """A graph is its step, done again; the output lands in the memory of the capture, as a graph's does."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, step: Step) -> Step:
        out = step()

        def replay() -> Tensor:
            self.replays += 1
            return out.copy_(step())

        return replay


def model(dtype: torch.dtype = torch.float64) -> K3Model:
    return new_model(tiny_k3(), dtype=dtype, seed=3, std=0.1, decay="slow").merge()


def make_engine(**options: Any) -> Engine:
    defaults: dict[str, Any] = {"page_size": 4, "num_pages": 60, "num_slots": 5, "pool": "fixed", "prefix_cache": False}
    defaults |= {"dtype": "float64", "is_poisoned": True, "max_batch_tokens": 24, "max_context": 80}
    return Engine(model(), EngineConfig(**(defaults | options)))


def answers(engine: Engine) -> dict[int, list[int]]:
    for n, prompt in enumerate(PROMPTS):
        draws = {"temperature": 0.8, "top_k": 20, "seed": n} if n % 2 else {}
        submit(engine, f"r{n}", prompt, max_tokens=5 + 3 * n, ignore_eos=True, **draws)
    deltas = run(engine)
    return {n: tokens_of(deltas[f"r{n}", 0]) for n in range(len(PROMPTS))}


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"pool": "unified", "retract_every": 4}])
def test_graphs_give_the_tokens_of_eager_steps(options: dict[str, Any]) -> None:
    expected = answers(make_engine(**options))
    engine, backend, told = make_engine(**options), FakeBackend(), []
    engine.runner.capture(4, 20, backend, lambda done, total: told.append((done, total)))
    assert answers(engine) == expected
    assert told == [(1, 3), (2, 3), (3, 3)] and backend.replays > 8


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_with_adapters_are_replayed_too(overlap: bool) -> None:
    """Base and two adapters in one batch, ranks of their own, experts or not; then a new version of one of them in the
    slot of the old, without another capture."""
    eager, fixed, graphed = (adapted_engine(overlap=overlap) for _ in range(3))
    backend = FakeBackend()
    fixed.runner.fixed_slots = graphed.runner.fixed_slots = 2
    graphed.runner.capture(4, 20, backend)
    for version in range(2):
        for engine in (eager, fixed, graphed):
            engine.load_adapter("a", random_adapter(engine.model_config, 2, seed=version, std=0.3, dtype=torch.float64))
        expected = answers_of_adapters(eager)
        assert answers_of_adapters(fixed) == answers_of_adapters(graphed) == expected
    assert answers_of_adapters(eager) != answers(adapted_engine(overlap=overlap))
    assert backend.replays > 20


def adapted_engine(**options: Any) -> Engine:
    engine = make_engine(max_loras=2, max_lora_rank=3, **options)
    only_attention = random_adapter(
        engine.model_config, 3, seed=9, std=0.3, dtype=torch.float64, wants=lambda site: site.num_experts is None
    )
    engine.load_adapter("b", only_attention)
    return engine


def answers_of_adapters(engine: Engine) -> dict[int, list[int]]:
    for n, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=5 + 3 * n, ignore_eos=True)
        adapter = (None, "a", "b")[n % 3]
        engine.add(Submit(request_id=f"r{n}", token_ids=prompt, params=params, adapter=adapter))
    deltas = run(engine)
    return {n: tokens_of(deltas[f"r{n}", 0]) for n in range(len(PROMPTS))}


def test_padding_goes_to_the_sinks_and_sees_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = make_engine(), set[tuple[int, int]]()
    engine.runner.capture(5, 20, FakeBackend())
    graphs = engine.runner.graphs
    assert graphs is not None
    fill = DecodeGraphs._fill

    def watch(self: DecodeGraphs, spans: Any) -> None:
        fill(self, spans)
        count = len(spans)
        assert self._rows[:, count:].tolist() == [[row] * (5 - count) for row in (0, 0, 0, 1, -1, 0)]
        for row, span in zip(self._table.rows.tolist(), spans, strict=False):
            used = num_pages(span, 4)
            assert row == [*span.pages[:used].tolist(), *[0] * (20 - used)]
        assert not self._table.rows[count:].any()
        assert self._rows[3, :count].tolist() == [span.end for span in spans]
        assert self._rows[1, :count].tolist() == [span.slot for span in spans] and self._rows[1, :count].all()
        seen.add((count, next(size for size in self.sizes if size >= count)))

    monkeypatch.setattr(DecodeGraphs, "_fill", watch)
    answers(engine)
    assert (3, 4) in seen and (1, 1) in seen


def test_steps_that_no_graph_holds_run_eagerly() -> None:
    expected = answers(make_engine())
    for max_batch, max_pages in ((1, 20), (4, 3)):
        engine = make_engine()
        engine.runner.capture(max_batch, max_pages, FakeBackend())
        assert answers(engine) == expected


def test_sizes_end_at_the_largest_and_pad_little() -> None:
    assert padded_sizes(1) == (1,) and padded_sizes(5) == (1, 2, 4, 5)
    sizes = padded_sizes(300)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24) and sizes[-1] == 300
    assert all(after - before <= max(8, before // 8) for before, after in pairwise(sizes))


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        EngineConfig(graph_batch=4)
    assert EngineConfig(graph_batch=4, device="cuda").graph_batch == 4
