"""Random loads, reloads, unloads, requests and aborts: every answer is that of the version its request began with."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.errors import RequestError
from baltoro.model.adapter import Adapter
from baltoro.model.build import new_model
from baltoro.model.context import train_context
from baltoro.model.decoder import K3Model
from baltoro.model.lora import merge_adapter
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from tests.model.adapters import random_adapter
from tests.tiny import tiny_k3

CONFIG = tiny_k3(vision=None, num_layers=4, mla_layers=(1, 3), num_experts=5, attn_res_block_size=2)
NUM_TOKENS = 4
PROMPTS = [tuple(range(n, n + length)) for n, length in ((0, 3), (0, 66), (0, 70), (9, 20))]
NAMES = ("a", "b", "c")


@cache
def _base() -> K3Model:
    return new_model(CONFIG, dtype=torch.float64, seed=3, std=0.15, decay="slow")


@cache
def _adapter(seed: int) -> Adapter:
    return random_adapter(CONFIG, 1 + seed % 4, seed=seed)


@cache
def _merged(seed: int | None) -> K3Model:
    model = copy.deepcopy(_base())
    if seed is not None:
        merge_adapter(model, _adapter(seed))
    return model


@cache
@torch.inference_mode()
def _answer(seed: int | None, prompt: tuple[int, ...]) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(_merged(seed)(train_context(torch.tensor(tokens), (len(tokens),)))[-1].argmax()))
    return tuple(tokens[len(prompt) :])


class _Driver:
    """One engine and what it should know."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.random = random.Random(seed)
        defaults = {"page_size": 16, "hash_endpoint": 64, "max_context": 90, "max_lora_rank": 4, "dtype": "float64"}
        config = EngineConfig(**(defaults | {"is_poisoned": True, "max_running": 4} | options))
        self.engine = Engine(copy.deepcopy(_base()).merge(), config, eos_ids=())
        self.loaded: dict[str, int] = {}
        self.wanted: dict[str, tuple[int | None, tuple[int, ...]]] = {}
        self.said: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    def act(self) -> None:
        draw, name = self.random.random(), self.random.choice(NAMES)
        if draw < 0.12:
            seed = self.random.randrange(6)
            self.engine.load_adapter(name, _adapter(seed))
            self.loaded[name] = seed
        elif draw < 0.16 and name in self.loaded:
            self.engine.unload_adapter(name)
            del self.loaded[name]
        elif draw < 0.20 and self.wanted:
            self.engine.abort(self.random.choice(list(self.wanted)))
        elif draw < 0.55:
            self._submit(self.random.choice((None, *NAMES)))
        else:
            self.step()

    def _submit(self, name: str | None) -> None:
        request, prompt = f"r{len(self.wanted)}", self.random.choice(PROMPTS)
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        submit = Submit(request_id=request, token_ids=prompt, params=params, adapter=name)
        if name is not None and name not in self.loaded:
            with pytest.raises(RequestError, match="not loaded"):
                self.engine.add(submit)
            return
        self.engine.add(submit)
        self.wanted[request] = (None if name is None else self.loaded[name], prompt)

    def step(self) -> None:
        for delta in self.engine.step():
            self.said.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ended[delta.request_id] = delta.finish_reason
        self.engine.audit()

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
        assert self.ended.keys() == self.wanted.keys()
        for request, (seed, prompt) in self.wanted.items():
            said, wanted = tuple(self.said.get(request, [])), _answer(seed, prompt)
            assert said == wanted[: len(said)], request
            assert len(said) == NUM_TOKENS or self.ended[request] == "abort"
        assert all(version.num_users == 0 for version in map(self.engine.adapters.select, self.loaded))
        self.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_loras": 1, "overlap": True},
        {"max_loras": 2, "overlap": True, "retract_every": 4, "num_slots": 5},
        {"max_loras": 2, "overlap": False, "host_cache_bytes": 1 << 20, "num_slots": 4, "pool": "fixed"},
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_operations(seed: int, options: dict[str, Any]) -> None:
    driver = _Driver(seed, **options)
    for _ in range(150):
        driver.act()
    driver.finish()
    assert sum(reason == "length" for reason in driver.ended.values()) > 10
