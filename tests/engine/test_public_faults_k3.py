"""Faults of docs/spec/serving.md G.1 on a tiny K3 with slow decay: a hit gives the logprobs of a fresh request.

Right is within 1e-3 (G.0): noise is a thousand times smaller, the state of another depth a thousand times larger.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from baltoro.cache.node_store import descendants
from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.model.build import new_model
from baltoro.model.context import train_context
from baltoro.model.decoder import K3Model
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from tests.engine.late import make_late
from tests.engine.stub import run, tokens_of
from tests.engine.truth import cache_of, make_moves
from tests.tiny import tiny_k3

NUM_TOKENS = 5


@cache
def _model() -> K3Model:
    return new_model(tiny_k3(), dtype=torch.float32, seed=3, std=0.1, decay="slow")


def _prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 119, (length,), generator=generator).tolist()


def _engine() -> Engine:
    options = {"page_size": 16, "max_batch_tokens": 64, "max_running": 2, "num_slots": 8, "max_context": 300}
    config = EngineConfig(dtype="float32", is_poisoned=True, overlap=True, hash_endpoint=64, **options)  # type: ignore[arg-type]
    return Engine(_model(), config, eos_ids=())


@torch.inference_mode()
def _gap(engine: Engine, name: str, prompt: list[int]) -> tuple[int, float]:
    """(cached tokens, largest difference of a logprob to those of one pass without a cache)."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0)
    engine.add(Submit(request_id=name, token_ids=tuple(prompt), params=params))
    found = run(engine)[name, 0]
    tokens = [*prompt, *tokens_of(found)]
    rows = torch.log_softmax(_model()(train_context(torch.tensor(tokens), (len(tokens),))).double(), -1)
    wanted = rows[torch.arange(len(prompt) - 1, len(tokens) - 1), tokens[len(prompt) :]]
    got = torch.tensor([delta.logprobs[0] for delta in found if delta.logprobs is not None], dtype=torch.float64)
    return found[-1].num_cached_tokens, float((got - wanted).abs().max())


@pytest.mark.slow
def test_a_then_b_then_a_again_on_a_late_device() -> None:
    """G-03, G-07, G-10: read in chunks; A is found at 128 of 140 tokens, and B has been in its slots meanwhile."""
    engine = _engine()
    make_late(engine, seed=2)
    for name, seed, length, hit in (("a", 1, 140, 0), ("b", 2, 200, 0), ("a again", 1, 140, 128), ("a on", 1, 70, 64)):
        cached, gap = _gap(engine, name, _prompt(length, seed))
        assert cached == hit or (name, cached) == ("a on", 0), "the state of 64 tokens may have been superseded"
        assert gap < 1e-3, name
    engine.close()


@pytest.mark.slow
def test_the_state_of_another_depth_would_be_seen() -> None:
    """G-10, and proof of the test above: with the state of 64 tokens in the slot of 128 the logprobs are others."""
    engine = _engine()
    _gap(engine, "short", _prompt(140, 1)[:70])
    _gap(engine, "long", _prompt(140, 1))
    make_moves(engine)
    (root,) = cache_of(engine).tree.store.roots.values()
    slots = {node.depth: node.state for node in descendants(root) if node.state is not None}
    physical = engine.scheduler.memory.physical_slot
    engine.pool.copy_slots([physical(slots[64])], [physical(slots[128])])
    cached, gap = _gap(engine, "again", _prompt(140, 1))
    assert cached == 128 and gap > 0.01
    engine.close()
