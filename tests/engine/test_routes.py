"""Routes that an engine tells are those that the routers took, whatever became of the request's memory on the way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.engine.planner import arena_layout
from baltoro.errors import ConfigError, RequestError
from baltoro.model.build import new_model
from baltoro.model.decoder import K3Model
from baltoro.model.lora import add_adapters
from baltoro.model.routes import bytes_per_token
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from tests.engine.stub import run, tokens_of
from tests.engine.test_graphs import FakeBackend
from tests.model.adapters import random_adapter
from tests.model.routing import own_routes, read
from tests.tiny import tiny_k3

CONFIG = tiny_k3(vision=None, media_token_id=None, num_experts=300, num_layers=3, mla_layers=(1,), vocab_size=121,
                 bos_token_id=117, eos_token_id=118, pad_token_id=119)  # fmt: skip
LONG = tuple((7 * n) % 113 for n in range(90))
PROMPTS = ((1,), (5, 9, 2, 7, 3), LONG[:30], LONG, (*LONG[:80], 4, 100))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked, overlapped": {"max_batch_tokens": 7, "overlap": True},
    "computed again": {"retract_every": 4, "max_batch_tokens": 13},
    "cached": {"prefix_cache": True, "max_running": 1},
    "from the host": {"prefix_cache": True, "retract_every": 3, "retract_to": "host", "host_cache_bytes": 1 << 22},
}


def model() -> K3Model:
    return new_model(CONFIG, dtype=torch.float64, seed=3, std=0.1, decay="slow")


def make_engine(**options: Any) -> Engine:
    defaults: dict[str, Any] = {"page_size": 4, "memory_bytes": 3 << 20, "hash_endpoint": 64, "track_interval": 64}
    defaults |= {"dtype": "float64", "is_poisoned": True, "max_context": 160, "max_running": 5, "prefix_cache": False}
    return Engine(model().merge(), EngineConfig(keeps_routed_experts=True, **(defaults | options)))


def ask(engine: Engine, name: str, prompt: Sequence[int], *, adapter: str | None = None, **fields: Any) -> None:
    params = SamplingParams(temperature=0.9, seed=len(prompt), max_tokens=fields.pop("most", 9), ignore_eos=True)
    fields = {"return_routed_experts": True, **fields}
    engine.add(Submit(request_id=name, token_ids=tuple(prompt), params=params, adapter=adapter, **fields))


@cache
def oracle() -> K3Model:
    found = model()
    bank = add_adapters(found, 2, 3)
    for slot in (1, 2):
        bank.install(slot, adapter(slot))
    return found


@cache
def adapter(version: int) -> Any:
    return random_adapter(CONFIG, 3, seed=version, std=0.3, dtype=torch.float64)


def check(prompt: Sequence[int], deltas: Sequence[TokenDelta], slot: int = 0) -> None:
    """All tokens but the last, and nothing before the end."""
    tokens = [*prompt, *tokens_of(deltas)][:-1]
    found = read(deltas[-1].routed_experts, CONFIG)
    assert torch.equal(found, own_routes(oracle(), tokens, slot))
    assert all(delta.routed_experts is None for delta in deltas[:-1])


@pytest.mark.parametrize(
    ("name", "is_captured"), [*((name, False) for name in CASES), ("chunked, overlapped", True), ("cached", True)]
)
def test_routes_are_those_of_a_forward_of_the_same_tokens(name: str, is_captured: bool) -> None:
    """Experts above 255 are among them, and a dense layer comes first."""
    engine = make_engine(**CASES[name])
    backend = FakeBackend()
    if is_captured:
        engine.runner.capture(4, 40, backend)
    for n, prompt in enumerate(PROMPTS):
        ask(engine, f"r{n}", prompt, n=2 if n == 2 else 1)
    deltas = run(engine)
    for (request, _), found in deltas.items():
        check(PROMPTS[int(request[1:])], found)
    assert max(int(read(found[-1].routed_experts, CONFIG).max()) for found in deltas.values()) > 255
    assert bool(backend.replays) == is_captured
    if name == "cached":
        assert deltas["r4", 0][-1].num_cached_tokens == 64
    engine.close()


@pytest.mark.parametrize("is_captured", [False, True])
def test_routes_with_adapters_are_theirs(is_captured: bool) -> None:
    engine = make_engine(max_loras=2, max_lora_rank=3)
    for version in (1, 2):
        engine.load_adapter(f"v{version}", adapter(version))
    if is_captured:
        engine.runner.fixed_slots = 2
        engine.runner.capture(4, 40, FakeBackend())
    for n, prompt in enumerate(PROMPTS[1:4]):
        ask(engine, f"r{n}", prompt, adapter=(None, "v1", "v2")[n])
    deltas = run(engine)
    for n, prompt in enumerate(PROMPTS[1:4]):
        check(prompt, deltas[f"r{n}", 0], n)
    assert not torch.equal(own_routes(oracle(), LONG, 1), own_routes(oracle(), LONG, 2))


@pytest.mark.parametrize("is_kept", [True, False])
def test_routes_after_an_update_and_a_sleep_are_those_of_the_state_that_goes_on(is_kept: bool) -> None:
    """Kept on the host: tokens before the update were computed by the old version, and stay so. Not kept: all are
    computed again, and the newest forward counts."""
    options: dict[str, Any] = {"prefix_cache": True, "retract_to": "host", "host_cache_bytes": 1 << 22}
    if not is_kept:
        options = {"max_batch_tokens": 13}
    engine = make_engine(max_loras=2, max_lora_rank=3, **options)
    engine.publish("v", 1, adapter(1), "", is_carrying=True)
    ask(engine, "r", LONG[:30], adapter="v", most=20)
    deltas = [delta for _ in range(8) for delta in engine.step()]
    engine.sleep()
    deltas += engine.scheduler.take_deltas()
    num_old = 30 + len(tokens_of(deltas)) - 1 if is_kept else 0
    engine.publish("v", 2, adapter(2), "", is_carrying=True)
    engine.wake()
    deltas += run(engine)["r", 0]
    tokens = [*LONG[:30], *tokens_of(deltas)][:-1]
    found, old = read(deltas[-1].routed_experts, CONFIG), own_routes(oracle(), tokens, 1)
    assert len(found) == len(tokens) == 49 and num_old < 45
    assert torch.equal(found[:num_old], old[:num_old])
    assert num_old > 30 or torch.equal(found, own_routes(oracle(), tokens, 2))
    assert all(bool((found[at] != old[at]).any()) for at in range(num_old, len(tokens)))
    engine.close()


def test_a_request_that_is_ended_brings_what_was_computed() -> None:
    engine = make_engine(overlap=True)
    ask(engine, "r", LONG[:30], most=50)
    ask(engine, "quiet", LONG[:30], return_routed_experts=False)
    deltas = [delta for _ in range(8) for delta in engine.step()]
    engine.abort("r")
    deltas += [delta for found in run(engine).values() for delta in found]
    ended = [delta for delta in deltas if delta.request_id == "r"]
    found = read(ended[-1].routed_experts, CONFIG)
    tokens = [*LONG[:30], *tokens_of(ended)]
    assert ended[-1].finish_reason == "abort" and len(tokens) - 1 <= len(found) <= len(tokens)
    assert torch.equal(found, own_routes(oracle(), tokens)[: len(found)])
    assert all(delta.routed_experts is None for delta in deltas if delta.request_id == "quiet")


def test_without_the_option_rows_have_no_room_and_nobody_may_ask() -> None:
    off, on = (arena_layout(CONFIG, torch.bfloat16, 16, has_routes=has) for has in (False, True))
    assert off.row is not None and on.row is not None
    assert off.row.shape == (1, CONFIG.kv_row_width) and bytes_per_token(CONFIG) == 2 * 3 * 2
    assert on.row.num_bytes - off.row.num_bytes == 64
    engine = Engine(model().merge(), EngineConfig(dtype="float64", memory_bytes=3 << 20, max_context=160))
    assert engine.runner.views.routes == ()
    with pytest.raises(RequestError, match="keeps_routed_experts"):
        ask(engine, "r", LONG)
    with pytest.raises(ConfigError, match="0 experts"):
        arena_layout(CONFIG.with_(num_experts=0), torch.bfloat16, 16, has_routes=True)
