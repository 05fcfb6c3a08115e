"""A model whose packed experts lie in tiles: logits, files, gradients and mapped base are those of the other order."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError, WeightsError
from baltoro.kernels.dispatch import expert_order
from baltoro.model.build import new_model
from baltoro.model.context import train_context
from baltoro.model.decoder import K3Model
from baltoro.model.lora import add_adapters
from baltoro.model.mapped import in_memory_order, model_on
from baltoro.model.moe import Experts
from baltoro.model.weights import load_into, load_model, save_model
from tests.engine.test_expert_weights import answers, engine
from tests.engine.test_expert_weights import folder as folder
from tests.model.adapters import random_adapter
from tests.model.test_mapped import lay_out, logits, packed_config


@pytest.fixture
def pair() -> tuple[K3Model, K3Model]:
    """One model twice: in the published order, and in tiles."""
    made = new_model(packed_config(hidden_size=48), std=0.2, decay="slow", seed=5)
    tiled = copy.deepcopy(made)
    assert set(tiled.tile_experts()) == {"tiled"}
    return made, tiled


def test_logits_are_the_same_and_tensors_those_of_a_file(pair: tuple[K3Model, K3Model], tmp_path: Path) -> None:
    made, tiled = pair
    assert torch.equal(logits(tiled), logits(made))
    wanted, found = made.tensors(), tiled.tensors()
    assert set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not any(name.endswith("w1_packed") for name in tiled.state_dict())
    for name, model in (("a", made), ("b", tiled)):
        save_model(model, tmp_path / name)
    files = [sorted(path for path in (tmp_path / name).iterdir() if path.suffix == ".safetensors") for name in "ab"]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    assert tiled.tile_experts() == {"tiled": 3}  # once more: nothing to do


def test_a_mapped_base_in_tiles_is_a_model_in_tiles(pair: tuple[K3Model, K3Model]) -> None:
    made, tiled = pair
    buffer, views = lay_out(tiled.merge())
    model = model_on(tiled.config, views, torch.float32).merge(may_copy=False)
    assert all(t.untyped_storage().data_ptr() == buffer.data_ptr() for t in model.state_dict().values())
    assert all(m.is_tiled for m in model.modules() if isinstance(m, Experts))
    assert torch.equal(logits(model), logits(made.merge()))
    name = next(name for name in views if name.endswith("first_packed"))
    with pytest.raises(ShapeError, match="first_packed"):
        model_on(tiled.config, views | {name: views[name][:, 1:]}, torch.float32)
    with pytest.raises(ShapeError, match="missing"):
        model_on(tiled.config, {n: t for n, t in views.items() if n != name}, torch.float32)


def test_files_are_not_read_into_tiles(pair: tuple[K3Model, K3Model], tmp_path: Path) -> None:
    made, tiled = pair
    save_model(made, tmp_path)
    with pytest.raises((WeightsError, ShapeError)):
        load_into(tiled.state_dict(), tmp_path)


def test_adapters_on_experts_and_their_gradients_read_tiles(pair: tuple[K3Model, K3Model]) -> None:
    found: list[tuple[Tensor, list[Tensor]]] = []
    for model in pair:
        model.requires_grad_(False)
        bank = add_adapters(model, 1, 4)
        bank.install(1, random_adapter(model.config, 4, seed=3))
        factors = [f for one in bank.factors.values() for f in (one.a.requires_grad_(), one.b.requires_grad_())]
        tokens = torch.arange(23) * 5 % model.config.vocab_size
        out = model(train_context(tokens, (9, 14), adapters=(1, 1)))
        found.append((out.detach(), list(torch.autograd.grad(out.square().mean(), factors))))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_values_and_scales_that_tiles_do_not_take(pair: tuple[K3Model, K3Model]) -> None:
    made, tiled = pair
    dense = copy.deepcopy(made).unpack_experts()
    assert dense.tile_experts() == {"dense": 3}
    unpacked, wanted = tiled.unpack_experts().tensors(), dense.tensors()
    assert all(torch.equal(unpacked[name], wanted[name]) for name in wanted)
    experts = next(m for m in made.modules() if isinstance(m, Experts))
    experts.w2_scale[0, 0, 0] = 161
    assert made.tile_experts() == {"tiled": 2, "a scale is beyond what products of tiles take": 1}
    assert "w1_packed" in experts.state_dict() and set(in_memory_order(made)) == set(made.stored())


def test_an_engine_whose_kernels_read_tiles_holds_them_and_says_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expert_order(torch.device("cpu"), torch.bfloat16) == "published"
    plain = engine(folder, "packed")
    monkeypatch.setattr("baltoro.engine.engine.expert_order", lambda device, dtype: "tiled")
    tiled = engine(folder, "packed")
    assert isinstance(tiled.runner.model, K3Model)
    assert all(m.is_tiled for m in tiled.runner.model.modules() if isinstance(m, Experts))
    assert answers(tiled) == answers(plain)
    stored, file = tiled.runner.model.tensors(), load_model(folder, dtype=torch.float64).tensors()
    assert set(stored) == set(file) and all(torch.equal(stored[name], file[name]) for name in file)
