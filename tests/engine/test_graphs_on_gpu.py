"""Captured decode steps on a CUDA device give the tokens of eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.model.build import new_model
from tests.engine.test_graphs import answers
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
