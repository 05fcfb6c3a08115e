"""Faults of docs/spec/training.md B.2 in the engine's adapters; docs/ideas/public-faults-training.md lists all."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.errors import RequestError
from baltoro.model.build import new_model
from baltoro.model.decoder import K3Model
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from tests.model.adapters import random_adapter, without_b
from tests.tiny import tiny_k3

PROMPT = tuple(range(70))


@pytest.fixture(scope="module")
def model() -> K3Model:
    return new_model(tiny_k3(vision=None), seed=3, std=0.1, decay="slow")


def opened(model: K3Model, **options: int) -> Engine:
    fields = {"page_size": 16, "max_running": 4, "max_context": 100, "max_loras": 1, "max_lora_rank": 4}
    return Engine(copy.deepcopy(model).merge(), EngineConfig(**(fields | options), dtype="float32"), eos_ids=())


def ask(engine: Engine, request: str, adapter: str | None) -> list[float]:
    """Logprobs of three greedy tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=0)
    engine.add(Submit(request_id=request, token_ids=PROMPT, params=params, adapter=adapter))
    found: list[float] = []
    while engine.has_work:
        for delta in engine.step():
            found += delta.logprobs or ()
    engine.audit()
    assert len(found) == 3
    return found


def test_fifty_updates_leave_one_version(model: K3Model) -> None:
    """AReaL#1385: adapters were never unloaded and the run hung at step 39. Versions that nobody uses are gone, with
    their host copies, whether or not requests ran with them."""
    engine = opened(model)
    alive: list[weakref.ref[object]] = []
    for number in range(50):
        adapter = random_adapter(model.config, 1, seed=number)
        alive.append(weakref.ref(next(iter(adapter.factors.values())).b))
        engine.load_adapter("policy", adapter)
        del adapter
        if number % 10 == 0:
            ask(engine, f"r{number}", "policy")
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 2  # the one that serves, and the one in the slot
    assert list(engine.adapters.facts()) == ["policy"]


def test_a_zero_adapter_serves_the_base_bit_for_bit(model: K3Model) -> None:
    """B-01: through the engine, prefill and decode; a gate that the wrapper goes around would show."""
    engine = opened(model)
    engine.load_adapter("zero", without_b(random_adapter(model.config, 3)))
    assert ask(engine, "base", None) == ask(engine, "zero", "zero")


def test_a_request_before_its_adapter_is_refused_and_never_served_by_the_base(model: K3Model) -> None:
    """B-08: an order of its own for base, adapter and requests; none is answered by what happens to be there."""
    engine = opened(model)
    with pytest.raises(RequestError, match="not loaded"):
        ask(engine, "early", "policy")
    engine.load_adapter("policy", random_adapter(model.config, 2))
    with_adapter = ask(engine, "later", "policy")
    assert with_adapter != ask(engine, "base", None)
    engine.unload_adapter("policy")
    with pytest.raises(RequestError, match="not loaded"):
        ask(engine, "late", "policy")


def test_an_update_that_changed_one_tensor_is_seen(model: K3Model) -> None:
    """B-07: a version differs from the last one in its digest, and so do its logprobs, or nothing was sent."""
    engine = opened(model)
    adapter = random_adapter(model.config, 2)
    name = next(iter(adapter.factors))
    digests, answers = [], [ask(engine, "base", None)]
    for number in range(2):
        engine.load_adapter("policy", adapter)
        digests.append(engine.adapters.facts()["policy"]["digest"])  # type: ignore[index]
        answers.append(ask(engine, f"r{number}", "policy"))
        adapter = copy.deepcopy(adapter)
        adapter.factors[name].b.mul_(3.0)
    assert digests[0] != digests[1]
    assert len({tuple(answer) for answer in answers}) == 3
    assert torch.isfinite(torch.tensor(answers)).all()
