"""Captured decode steps on a CUDA device give the tokens of eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.model.build import new_model
from tests.engine.test_graphs import answers, answers_of_adapters
from tests.model.adapters import random_adapter
from tests.tiny import tiny_k3

pytestmark = pytest.mark.gpu


def make_engine(**options: Any) -> Engine:
    model = new_model(tiny_k3(), dtype=torch.float32, seed=3, std=0.1, decay="slow", device="cuda").merge()
    defaults: dict[str, Any] = {"page_size": 4, "num_pages": 60, "num_slots": 5, "pool": "fixed", "device": "cuda"}
    defaults |= {"dtype": "float32", "max_batch_tokens": 24, "max_context": 80, "prefix_cache": False}
    return Engine(model, EngineConfig(**(defaults | options)))


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_tokens_are_equal(is_overlapped: bool) -> None:
    expected = answers(make_engine(overlap=is_overlapped))
    assert answers(make_engine(overlap=is_overlapped, graph_batch=8)) == expected


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_adapters_are_captured_too(is_overlapped: bool) -> None:
    """Base and two adapters in one batch, then a new version of one of them in its slot."""
    options = {"overlap": is_overlapped, "max_loras": 2, "max_lora_rank": 3}
    eager, graphed = make_engine(**options), make_engine(graph_batch=8, **options)
    eager.runner.fixed_slots = 0
    assert graphed.runner.fixed_slots == 2 and graphed.runner.graphs is not None
    for version in range(2):
        for engine in (eager, graphed):
            for name, seed, rank in (("a", version, 2), ("b", 9, 3)):
                engine.load_adapter(name, random_adapter(engine.model_config, rank, seed=seed, std=0.2))
        assert answers_of_adapters(graphed) == answers_of_adapters(eager)
