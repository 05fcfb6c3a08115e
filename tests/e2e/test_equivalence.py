"""Lossless options one at a time: what may not change a token, on short prompts down to one token.

Every row is an engine with other options on the same requests; the oracle is each request alone in one span through the
model, without a cache. Free memory is NaN throughout. Options against each other, on long conversations that the
cache serves: `test_equivalence_matrix.py`.
    float64  greedy tokens equal, each from a forward of its own
    float32  logprobs of prompts and answers within 1e-5 of the oracle's for the same tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from baltoro.engine.engine import Engine
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import MediaItem, Submit
from tests.e2e.conversation import NUM_FEATURES, PAD, PICTURE_GRID, alone, make_engine, pixels
from tests.engine.stub import run, tokens_of

LENGTHS = (1, 2, 5, 64, 90)
NUM_TOKENS = 6

ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alone": {"max_running": 1},
    "page 1": {"page_size": 1},
    "page 4": {"page_size": 4},
    "page 64": {"page_size": 64},
    "budget 1": {"max_batch_tokens": 1},
    "budget 7": {"max_batch_tokens": 7},
    "budget 100": {"max_batch_tokens": 100},
    "forced retraction": {"retract_every": 3},
    "routes kept": {"page_size": 4, "retract_every": 3, "keeps_routed_experts": True},
    "little memory": {"page_size": 4, "num_pages": 46, "max_context": 160, "pool": "fixed"},
    "all at once": {"page_size": 4, "max_batch_tokens": 50, "retract_every": 5, "num_slots": 3},
}


@cache
def _prompts(name: str) -> dict[str, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(11)
    prompts = {f"r{n}": tuple(torch.randint(0, 119, (n,), generator=generator).tolist()) for n in LENGTHS}
    if name == "k3":
        prompts["picture"] = (*range(20), *[PAD] * NUM_FEATURES, *range(30, 45))
    return prompts


def _alone(name: str, dtype: torch.dtype, tokens: Sequence[int], num_prompt: int) -> torch.Tensor:
    """Logits [T, X] of a prompt and its answer in one span without a cache."""
    return alone(name, dtype, tuple(tokens), num_prompt, 0 if PAD in tokens[:num_prompt] else None)


@cache
def _oracle(name: str) -> dict[str, tuple[int, ...]]:
    """Greedy tokens in float64, each request alone, everything recomputed for each token."""
    found = {}
    for request, prompt in _prompts(name).items():
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(_alone(name, torch.float64, tokens, len(prompt))[-1].argmax()))
        found[request] = tuple(tokens[len(prompt) :])
    return found


def _engine(name: str, dtype: torch.dtype, options: dict[str, Any]) -> Engine:
    defaults: dict[str, Any] = {"page_size": 16, "max_running": 6, "max_context": 200, "is_poisoned": True}
    return make_engine(name, dtype, defaults | options)


def _add(engine: Engine, name: str, prompt: Sequence[int], params: SamplingParams, n: int = 1) -> None:
    media = (MediaItem(pixels(0).numpy().tobytes(), PICTURE_GRID, 6),) if PAD in prompt else ()
    engine.add(Submit(request_id=name, token_ids=tuple(prompt), params=params, media=media, n=n))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row"), [*(("k3", row) for row in ROWS), ("kimi_linear", "budget 7"), ("kimi_linear", "all at once")]
)
def test_greedy_tokens_are_equal_in_float64(name: str, row: str) -> None:
    engine = _engine(name, torch.float64, ROWS[row])
    for request, prompt in _prompts(name).items():
        _add(engine, request, prompt, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    deltas = run(engine)
    assert {request: tuple(tokens_of(deltas[request, 0])) for request in _prompts(name)} == _oracle(name)
    if "retract" in row or "memory" in row:
        assert engine.stats()["num_retracted_reqs"]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_logprobs_agree_in_float32(row: str) -> None:
    """Of every prompt token and every token of the answer."""
    engine = _engine("k3", torch.float32, ROWS[row])
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, prompt_logprobs=0)
    for request, prompt in _prompts("k3").items():
        _add(engine, request, prompt, params)
    deltas = run(engine)
    for request, prompt in _prompts("k3").items():
        found = deltas[request, 0]
        tokens = [*prompt, *tokens_of(found)]
        logprobs = torch.log_softmax(_alone("k3", torch.float32, tokens, len(prompt)), -1)
        wanted = logprobs[torch.arange(len(tokens) - 1), tokens[1:]].numpy()
        assert found[0].prompt_logprobs is not None
        output = [delta.logprobs[0] for delta in found if delta.logprobs is not None]
        assert np.abs(np.array([*found[0].prompt_logprobs[1:], *output]) - wanted).max() < 1e-5


def test_forks_equal_requests_of_their_own() -> None:
    """n samples of one prompt, with little memory, equal the same seeds one at a time."""
    prompt = _prompts("k3")["r90"]
    params = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, seed=4)
    outputs = []
    for options in ({}, {"num_slots": 1}, {"page_size": 4, "num_pages": 80, "max_context": 160, "retract_every": 3}):
        engine = _engine("k3", torch.float64, options)
        _add(engine, "many", prompt, params, n=3)
        deltas = run(engine)
        outputs.append([tokens_of(deltas["many", index]) for index in range(3)])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({tuple(output) for output in outputs[0]}) == 3


def test_a_lost_state_would_be_seen() -> None:
    """The matrix has teeth: zeroing one request's slot in the middle changes its tokens."""
    engine = _engine("k3", torch.float64, {})
    _add(engine, "r64", _prompts("k3")["r64"], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    tokens = [t for _ in range(3) for d in engine.step() for t in d.token_ids]
    (slot,) = {request.slot for request in engine.scheduler.running}
    for part in engine.pool.slot_views():
        part[slot] = 0.0
    while engine.has_work:
        tokens += [t for d in engine.step() for t in d.token_ids]
    assert tuple(tokens) != _oracle("k3")["r64"]
