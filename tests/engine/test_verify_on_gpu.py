"""Draft windows on a CUDA device: captured, eager and one by one draw the same greedy tokens in FP32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.model.build import new_model
from tests.engine.test_graphs import answers
from tests.engine.walker import Walker, greedy, speculate
from tests.model.adapters import random_adapter
from tests.model.harness import random_tokens
from tests.tiny import tiny_k3

pytestmark = pytest.mark.gpu

LENGTHS = (1, 13, 30, 4)


def make_engine(*, is_packed: bool = False, **options: Any) -> Engine:
    config = tiny_k3(are_experts_packed=is_packed)
    model = new_model(config, dtype=torch.float32, seed=3, std=0.1, decay="slow", device="cuda").merge()
    defaults: dict[str, Any] = {"page_size": 4, "num_pages": 80, "num_slots": 5, "pool": "fixed", "device": "cuda"}
    defaults |= {"dtype": "float32", "max_batch_tokens": 40, "max_context": 80, "prefix_cache": False}
    return Engine(model, EngineConfig(**(defaults | {"max_running": 5, "is_poisoned": True} | options)))


def prompts() -> list[list[int]]:
    return [random_tokens(length, 131, length) for length in LENGTHS]


@pytest.mark.parametrize(("width", "is_packed"), [(2, False), (5, True), (8, False), (8, True)])
def test_speculation_draws_the_tokens_of_plain_decodes(width: int, is_packed: bool) -> None:
    expected = greedy(Walker(make_engine(is_packed=is_packed), 4), prompts(), 32)
    for graphs in (0, 4):
        engine = make_engine(is_packed=is_packed, verify_window=width, graph_batch=graphs)
        walker = Walker(engine, 4)
        assert set(walker.verifier.sizes) == ({1, 2, 4} if graphs else set())
        assert speculate(walker, prompts(), expected, 131)[0] == expected


@pytest.mark.parametrize("width", [2, 5, 8])
def test_captured_steps_equal_eager_ones_and_decodes(width: int) -> None:
    """Logits of ragged windows of true tokens, and states behind the fold."""
    plain = Walker(make_engine(), 4)
    others = [Walker(make_engine(verify_window=width, graph_batch=graphs), 4) for graphs in (0, 8)]
    work = [(n, random_tokens(1 + (n + width - 1) % width, 131, 50 + n)) for n in range(4)]
    truth = {n: [] for n in range(4)}
    for walker in (plain, *others):
        for n, prompt in enumerate(prompts()):
            walker.step([(n, prompt)])
    states = {}
    for n, window in work:
        for token in window:
            truth[n].append(plain.step([(n, [token])])[0][0])
        states[n] = plain.state(n)
    for walker in others:
        found = walker.verify(work)
        assert bool(torch.isfinite(found.logits).all()), "padded tokens are finite as well"
        for (n, window), logits in zip(work, found.logits, strict=True):
            torch.testing.assert_close(logits[: len(window)], torch.stack(truth[n]), atol=2e-4, rtol=1e-3)
        walker.fold(work, [len(window) for _, window in work])
        for n in range(4):
            for got, expected in zip(walker.state(n), states[n], strict=True):
                torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-3)


def test_windows_of_adapters() -> None:
    """Base and two adapters in one step; a second graph has their terms."""
    slots = [0, 1, 2, 1]

    def adapted(**options: Any) -> Walker:
        engine = make_engine(max_loras=2, max_lora_rank=3, **options)
        assert engine.bank is not None
        for slot, rank in ((1, 2), (2, 3)):
            engine.bank.install(slot, random_adapter(engine.model_config, rank, seed=slot, std=0.2))
        walker = Walker(engine, 4)
        walker.adapters = slots
        return walker

    expected = greedy(adapted(), prompts(), 24)
    for graphs in (0, 4):
        walker = adapted(verify_window=6, graph_batch=graphs)
        assert len(walker.verifier.steps) == (6 if graphs else 0)
        assert speculate(walker, prompts(), expected, 131)[0] == expected


def test_an_engine_with_room_for_windows_serves_as_before() -> None:
    expected = answers(make_engine())
    assert answers(make_engine(verify_window=8, graph_batch=8)) == expected
