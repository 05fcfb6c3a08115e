"""The equivalence matrix: what may not change a token, on a real tiny K3 and a Kimi-Linear with slow decay.

Every row of the matrix is an engine with other options on the same requests; the oracle is each request alone in one
span through the model, without a cache, once per token. Free memory is NaN throughout.
    float64  greedy tokens equal
    float32  logprobs of prompts and answers within 1e-5 of the oracle's for the same tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.model.build import new_model
from baltoro.model.context import ForwardContext, Media, train_context
from baltoro.model.decoder import K3Model
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import MediaItem, Submit
from tests.engine.stub import run, tokens_of
from tests.tiny import tiny_k3, tiny_kimi_linear

LENGTHS = (1, 2, 5, 64, 90)
NUM_TOKENS = 6
PICTURE_GRID = (1, 4, 6)  # 6 features
PAD = 126

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
    "little memory": {"page_size": 4, "num_pages": 46, "max_context": 160, "pool": "fixed"},
    "all at once": {"page_size": 4, "max_batch_tokens": 50, "retract_every": 5, "num_slots": 3},
}


@cache
def _model(name: str, dtype: torch.dtype) -> K3Model:
    config = tiny_k3() if name == "k3" else tiny_kimi_linear()
    return new_model(config, dtype=dtype, seed=3, std=0.1, decay="slow")


@cache
def _prompts(name: str) -> dict[str, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(11)
    prompts = {f"r{n}": tuple(torch.randint(0, 119, (n,), generator=generator).tolist()) for n in LENGTHS}
    if name == "k3":
        prompts["picture"] = (*range(20), *[PAD] * 6, *range(30, 45))
    return prompts


@cache
def _pixels() -> torch.Tensor:
    return torch.rand(24, 3, 6, 6, generator=torch.Generator().manual_seed(5)) * 2 - 1


@torch.inference_mode()
def _alone(model: K3Model, tokens: Sequence[int], num_prompt: int) -> torch.Tensor:
    """Log-probabilities [T, X] of a prompt and its answer in one span without a cache."""
    ctx = train_context(torch.tensor(tokens), (len(tokens),))
    rows = [at for at, token in enumerate(tokens[:num_prompt]) if token == PAD]
    media = Media(_pixels(), (PICTURE_GRID,), torch.tensor(rows), torch.arange(len(rows))) if rows else None
    return torch.log_softmax(model(ForwardContext(ctx.tokens, ctx.spans, media=media)).double(), -1)


@cache
def _oracle(name: str) -> dict[str, tuple[int, ...]]:
    """Greedy tokens in float64, each request alone, everything recomputed for each token."""
    model, found = _model(name, torch.float64), {}
    for request, prompt in _prompts(name).items():
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(_alone(model, tokens, len(prompt))[-1].argmax()))
        found[request] = tuple(tokens[len(prompt) :])
    return found


def _engine(model: K3Model, options: dict[str, Any]) -> Engine:
    dtype = str(model.dtype).removeprefix("torch.")
    defaults: dict[str, Any] = {"page_size": 16, "max_running": 6, "max_context": 200, "is_poisoned": True}
    return Engine(model, EngineConfig(dtype=dtype, **(defaults | options)), eos_ids=())


def _add(engine: Engine, name: str, prompt: Sequence[int], params: SamplingParams, n: int = 1) -> None:
    media = (MediaItem(_pixels().numpy().tobytes(), PICTURE_GRID, 6),) if PAD in prompt else ()
    engine.add(Submit(request_id=name, token_ids=tuple(prompt), params=params, media=media, n=n))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row"), [*(("k3", row) for row in ROWS), ("kimi_linear", "budget 7"), ("kimi_linear", "all at once")]
)
def test_greedy_tokens_are_equal_in_float64(name: str, row: str) -> None:
    engine = _engine(_model(name, torch.float64), ROWS[row])
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
    model = _model("k3", torch.float32)
    engine = _engine(model, ROWS[row])
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, prompt_logprobs=0)
    for request, prompt in _prompts("k3").items():
        _add(engine, request, prompt, params)
    deltas = run(engine)
    for request, prompt in _prompts("k3").items():
        found = deltas[request, 0]
        tokens = [*prompt, *tokens_of(found)]
        wanted = _alone(model, tokens, len(prompt))[torch.arange(len(tokens) - 1), tokens[1:]].numpy()
        assert found[0].prompt_logprobs is not None
        output = [delta.logprobs[0] for delta in found if delta.logprobs is not None]
        assert np.abs(np.array([*found[0].prompt_logprobs[1:], *output]) - wanted).max() < 1e-5


def test_forks_equal_requests_of_their_own() -> None:
    """n samples of one prompt, with little memory, equal the same seeds one at a time."""
    model = _model("k3", torch.float64)
    prompt = _prompts("k3")["r90"]
    params = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, seed=4)
    outputs = []
    for options in ({}, {"num_slots": 1}, {"page_size": 4, "num_pages": 80, "max_context": 160, "retract_every": 3}):
        engine = _engine(model, options)
        _add(engine, "many", prompt, params, n=3)
        deltas = run(engine)
        outputs.append([tokens_of(deltas["many", index]) for index in range(3)])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({tuple(output) for output in outputs[0]}) == 3


def test_a_lost_state_would_be_seen() -> None:
    """The matrix has teeth: zeroing one request's slot in the middle changes its tokens."""
    engine = _engine(_model("k3", torch.float64), {})
    _add(engine, "r64", _prompts("k3")["r64"], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    tokens = [t for _ in range(3) for d in engine.step() for t in d.token_ids]
    (slot,) = {request.slot for request in engine.scheduler.running}
    for part in engine.pool.slot_views():
        part[slot] = 0.0
    while engine.has_work:
        tokens += [t for d in engine.step() for t in d.token_ids]
    assert tuple(tokens) != _oracle("k3")["r64"]
