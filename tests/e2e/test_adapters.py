"""Requests of several adapters in one batch equal each alone, whatever the cache, the overlap and the memory do.

float64  greedy tokens equal those of the model with the adapter merged into its (dense) weights, without a cache
float32  logprobs within 1e-5 of each request's alone, in one span and without a cache
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.errors import ConfigError, RequestError, WeightsError
from baltoro.model.adapter import Adapter
from baltoro.model.build import new_model
from baltoro.model.context import train_context
from baltoro.model.decoder import K3Model
from baltoro.model.lora import add_adapters, merge_adapter
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from tests.engine.stub import StubModel, make_engine, run, tokens_of
from tests.model.adapters import random_adapter
from tests.tiny import tiny_k3

NUM_TOKENS = 5
RANKS = {"small": 1, "wide": 8, "middle": 3, "late": 4}
SHARED = tuple(range(64))  # a prefix that all requests have: it must not be shared between adapters
WORK = [  # (request, adapter, what follows the shared prefix)
    ("base", None, (7, 8)),
    ("s1", "small", (7, 8)),
    ("w1", "wide", (7, 8)),
    ("m1", "middle", (1, 2, 3)),
    ("s2", "small", (50, 60, 70)),
    ("b2", None, (9,)),
    ("l1", "late", (7, 8)),
    ("w2", "wide", (7, 8)),
]
ROWS: dict[str, dict[str, Any]] = {
    "three slots": {},
    "one slot": {"max_loras": 1},
    "overlap": {"overlap": True, "max_loras": 2},
    "no cache": {"prefix_cache": False, "overlap": False},
    "retraction": {"retract_every": 3, "overlap": True, "max_loras": 2, "max_batch_tokens": 50},
    "host": {"host_cache_bytes": 1 << 20, "num_slots": 4, "retract_every": 5, "retract_to": "host", "max_loras": 2},
}


@cache
def _model(dtype: torch.dtype) -> K3Model:
    return new_model(tiny_k3(vision=None), dtype=dtype, seed=3, std=0.1, decay="slow")


@cache
def _adapter(name: str) -> Adapter:
    return random_adapter(_model(torch.float64).config, RANKS[name], seed=len(name), std=0.07)


@cache
def _merged(dtype: torch.dtype, name: str | None) -> K3Model:
    model = copy.deepcopy(_model(dtype))
    if name is not None:
        merge_adapter(model, _adapter(name))
    return model


@cache
def _beside(dtype: torch.dtype, name: str | None) -> K3Model:
    model = copy.deepcopy(_model(dtype))
    if name is not None:
        add_adapters(model, 1, RANKS[name]).install(1, _adapter(name))
    return model


@torch.inference_mode()
def _alone(model: K3Model, tokens: list[int], adapters: tuple[int, ...] | None = None) -> torch.Tensor:
    ctx = train_context(torch.tensor(tokens), (len(tokens),), adapters=adapters)
    return torch.log_softmax(model(ctx).double(), -1)


@cache
def _oracle(name: str | None, prompt: tuple[int, ...]) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(_alone(_merged(torch.float64, name), tokens)[-1].argmax()))
    return tuple(tokens[len(prompt) :])


def _engine(dtype: torch.dtype, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "page_size": 16,
        "max_running": 6,
        "max_context": 100,
        "is_poisoned": True,
        "hash_endpoint": 64,
        "max_loras": 3,
        "max_lora_rank": 8,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return Engine(copy.deepcopy(_model(dtype)).merge(), EngineConfig(**(defaults | options)), eos_ids=())


def _add(engine: Engine, request: str, adapter: str | None, prompt: tuple[int, ...], **params: Any) -> None:
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": NUM_TOKENS} | params))
    engine.add(Submit(request_id=request, token_ids=prompt, params=sampling, adapter=adapter))


def _loaded(dtype: torch.dtype, **options: Any) -> Engine:
    engine = _engine(dtype, **options)
    for name in RANKS:
        engine.load_adapter(name, _adapter(name))
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_mixed_batches_equal_each_alone_in_float64(row: str) -> None:
    engine = _loaded(torch.float64, **ROWS[row])
    num_slots = engine.config.max_loras
    for again in ("", "-again"):  # the second time from the cache
        for request, adapter, rest in WORK:
            _add(engine, request + again, adapter, SHARED + rest)
        most = 0
        deltas: dict[tuple[str, int], list[Any]] = {}
        while engine.has_work:
            for delta in engine.step():
                deltas.setdefault((delta.request_id, delta.index), []).append(delta)
            engine.audit()
            most = max(most, len({r.adapter for r in engine.scheduler.running if r.adapter is not None}))
        assert 0 < most <= num_slots
        for request, adapter, rest in WORK:
            got = deltas[request + again, 0]
            assert tuple(tokens_of(got)) == _oracle(adapter, SHARED + rest), (row, request)
            if again and engine.config.prefix_cache and "retract" not in row and "host" not in row:
                assert got[0].num_cached_tokens == 64
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("row", ["three slots", "overlap"])
def test_logprobs_of_mixed_batches_agree_in_float32(row: str) -> None:
    engine = _loaded(torch.float32, **ROWS[row])
    for request, adapter, rest in WORK:
        _add(engine, request, adapter, SHARED + rest, logprobs=0, prompt_logprobs=0)
    deltas = run(engine)
    for request, adapter, rest in WORK:
        found, prompt = deltas[request, 0], SHARED + rest
        tokens = [*prompt, *tokens_of(found)]
        slots = None if adapter is None else (1,)
        alone = _alone(_beside(torch.float32, adapter), tokens, slots)
        wanted = alone[torch.arange(len(tokens) - 1), tokens[1:]].numpy()
        assert found[0].prompt_logprobs is not None
        output = [delta.logprobs[0] for delta in found if delta.logprobs is not None]
        assert np.abs(np.array([*found[0].prompt_logprobs[1:], *output]) - wanted).max() < 1e-5
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_reload_under_the_same_name_finds_nothing_and_answers_anew(overlap: bool) -> None:
    """spec/training.md B.2.10: the key of the cache is the version, not the name."""
    engine = _engine(torch.float64, max_loras=1, overlap=overlap)
    prompt = (*SHARED, 7, 8)
    told = []
    for n, name in enumerate(("wide", "middle", "wide")):
        engine.load_adapter("mine", _adapter(name))
        cached = []
        for again in range(2):
            _add(engine, f"r{n}{again}", "mine", prompt)
            found = run(engine)[f"r{n}{again}", 0]
            assert tuple(tokens_of(found)) == _oracle(name, prompt)
            cached.append(found[0].num_cached_tokens)
            told.append(found[0].version)
        assert cached == [0, 64]
    assert told == [1, 1, 2, 2, 3, 3]
    engine.close()


def test_running_requests_keep_their_version_and_nothing_is_aborted() -> None:
    """spec/training.md B.2.12: a new version changes no request that runs."""
    engine = _engine(torch.float64, max_loras=2, overlap=True)
    engine.load_adapter("mine", _adapter("wide"))
    for n in range(3):
        _add(engine, f"old{n}", "mine", (*SHARED, n))
    early = [engine.step() for _ in range(3)]
    old = engine.adapters.select("mine")
    engine.load_adapter("mine", _adapter("middle"))
    for n in range(3):
        _add(engine, f"new{n}", "mine", (*SHARED, n))
    deltas = run(engine)
    for delta in (d for step in early for d in step):
        deltas.setdefault((delta.request_id, 0), []).insert(0, delta)
    for n in range(3):
        ids = [t for d in sorted(deltas[f"old{n}", 0], key=lambda d: d.finish_reason is not None) for t in d.token_ids]
        assert sorted(ids) == sorted(_oracle("wide", (*SHARED, n)))
        assert tuple(tokens_of(deltas[f"new{n}", 0])) == _oracle("middle", (*SHARED, n))
    assert engine.stats()["num_aborted_reqs"] == 0 and old.is_gone
    engine.close()


def test_what_cannot_be_served_is_refused_with_words() -> None:
    engine = _engine(torch.float64)
    with pytest.raises(RequestError, match="'x' is not loaded"):
        _add(engine, "r", "x", SHARED)
    with pytest.raises(WeightsError, match="rank 9, slots hold 8"):
        engine.load_adapter("x", random_adapter(engine.model_config, 9))
    with pytest.raises(WeightsError, match=r"adapter_config\.json"):
        engine.load_adapter("x", "/nowhere")
    assert not engine.adapters.facts()
    with pytest.raises(ConfigError, match="max-loras"):
        _engine(torch.float64, max_loras=0).load_adapter("x", _adapter("wide"))
    with pytest.raises(ConfigError, match="no place for adapters"):
        make_engine(StubModel(), max_loras=1)


def test_an_engine_without_loaded_adapters_makes_the_contexts_it_always_made() -> None:
    """The base path is the old one: no map of adapters reaches the model."""
    engine = _loaded(torch.float64)
    seen = []
    forward = engine.runner.model

    def spy(ctx: Any) -> torch.Tensor:
        seen.append(ctx.adapters)
        return forward(ctx)

    spy.config = forward.config  # type: ignore[attr-defined]
    engine.runner.model = spy  # type: ignore[assignment]
    _add(engine, "r", None, SHARED)
    run(engine)
    assert seen and set(seen) == {None}
    _add(engine, "s", "wide", SHARED)
    run(engine)
    assert seen[-1] is not None
