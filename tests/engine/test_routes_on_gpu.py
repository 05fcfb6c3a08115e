"""Routes on a CUDA device: captured and eager steps tell what the routers took, with adapters and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.model.build import new_model
from baltoro.model.decoder import K3Model
from baltoro.model.lora import add_adapters
from baltoro.protocol.completion import TokenDelta
from tests.engine.stub import run, tokens_of
from tests.engine.test_routes import CONFIG, PROMPTS, ask
from tests.model.adapters import random_adapter
from tests.model.routing import own_routes, read

pytestmark = pytest.mark.gpu


def model(dtype: torch.dtype) -> K3Model:
    return new_model(CONFIG, dtype=dtype, seed=3, std=0.1, decay="slow", device="cuda")


def answers(dtype: torch.dtype, **options: Any) -> dict[int, list[TokenDelta]]:
    """Of every prompt, with the base and an adapter in turn."""
    defaults: dict[str, Any] = {"page_size": 16, "memory_bytes": 16 << 20, "hash_endpoint": 64, "track_interval": 64}
    defaults |= {"device": "cuda", "dtype": str(dtype).removeprefix("torch."), "max_context": 160, "max_running": 5}
    defaults |= {"max_loras": 2, "max_lora_rank": 3, "keeps_routed_experts": True}
    engine = Engine(model(dtype).merge(), EngineConfig(**(defaults | options)))
    engine.load_adapter("v", random_adapter(CONFIG, 3, seed=1, std=0.2, dtype=dtype))
    for n, prompt in enumerate(PROMPTS):
        ask(engine, f"r{n}", prompt, adapter="v" if n % 2 else None)
    found = run(engine)
    assert engine.runner.graphs is not None or not options.get("graph_batch")
    return {n: found[f"r{n}", 0] for n in range(len(PROMPTS))}


@pytest.mark.parametrize("options", [{}, {"graph_batch": 8}, {"graph_batch": 8, "overlap": False}])
def test_routes_in_float32_are_those_of_a_forward(options: dict[str, Any]) -> None:
    """As sets: of two experts that are equal to rounding either may come first."""
    oracle = model(torch.float32)
    add_adapters(oracle, 1, 3).install(1, random_adapter(CONFIG, 3, seed=1, std=0.2))
    num_same = num_all = 0
    for n, deltas in answers(torch.float32, **options).items():
        tokens = [*PROMPTS[n], *tokens_of(deltas)][:-1]
        found, own = read(deltas[-1].routed_experts, CONFIG), own_routes(oracle, tokens, n % 2).cpu()
        assert found.shape == own.shape
        is_same = (found.sort(-1).values == own.sort(-1).values).all(-1)
        num_same, num_all = num_same + int(is_same.sum()), num_all + is_same.numel()
    assert num_same >= 0.99 * num_all
