"""Packed experts, kept packed or as the values they stand for: the same tokens, and a choice that is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine, load_engine
from baltoro.errors import ConfigError
from baltoro.kernels.quant import mxfp4
from baltoro.model.build import new_model
from baltoro.model.weights import save_model
from tests.engine.test_graphs import answers
from tests.tiny import tiny_k3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("packed")
    save_model(new_model(tiny_k3(are_experts_packed=True), std=0.2, decay="slow", seed=4), place)
    return place


def engine(folder: Path, kind: str, **options: object) -> Engine:
    config = {"memory_bytes": 8 << 20, "max_context": 96, "dtype": "float64", "expert_weights": kind} | options
    return load_engine(folder, EngineConfig(**config))  # type: ignore[arg-type]


def test_packed_and_dense_give_the_same_tokens_and_auto_is_dense_on_a_cpu(folder: Path) -> None:
    made = {kind: engine(folder, kind) for kind in ("packed", "dense", "auto")}
    kept = {kind: any(name.endswith("w1_packed") for name in one.runner.model.tensors()) for kind, one in made.items()}  # type: ignore[union-attr]
    assert kept == {"packed": True, "dense": False, "auto": False}
    found = {kind: answers(one) for kind, one in made.items()}
    assert found["packed"] == found["dense"] == found["auto"]


def test_auto_stays_packed_where_dense_takes_too_much(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baltoro.engine.planner.DENSE_BYTES", 1000)
    assert any(name.endswith("w1_packed") for name in engine(folder, "auto").runner.model.tensors())  # type: ignore[union-attr]


def test_a_base_that_others_map_stays_packed(folder: Path, tmp_path: Path) -> None:
    shared = engine(folder, "auto", base_path=str(tmp_path / "base"))
    assert any(name.endswith("w1_packed") for name in shared.runner.model.tensors())  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="a base that others map stays packed"):
        EngineConfig(base_path="x", expert_weights="dense")
    with pytest.raises(ConfigError, match="must be one of auto, packed, dense"):
        EngineConfig(expert_weights="int4")  # type: ignore[arg-type]


def test_values_are_those_of_the_packed_ones_in_the_models_dtype(folder: Path) -> None:
    packed, dense = (engine(folder, kind).runner.model for kind in ("packed", "dense"))
    stored, found = packed.tensors(), dense.tensors()  # type: ignore[union-attr]
    names = [name for name in found if name not in stored]
    assert names and all(name.endswith((".w1", ".w2", ".w3")) for name in names)
    for name in names:
        wanted = mxfp4.dequantise(stored[f"{name}_packed"], stored[f"{name}_scale"], torch.float64)
        assert torch.equal(found[name], wanted)
