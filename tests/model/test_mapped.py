"""A model on bytes that are somebody else's: nothing copied, nothing written, nothing of it kept for backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.model.build import new_model
from baltoro.model.config import K3Config
from baltoro.model.context import train_context
from baltoro.model.decoder import K3Model
from baltoro.model.lora import AdapterBank, add_adapters
from baltoro.model.mapped import in_memory_order, model_on
from tests.model.adapters import random_adapter
from tests.tiny import tiny_k3, tiny_kimi_linear

ALIGN = 64
T = 23  # no dimension of the models


def lay_out(model: K3Model) -> tuple[Tensor, dict[str, Tensor]]:
    """All tensors in one buffer, as a shared base has them: (buffer, views)."""
    tensors, ends = in_memory_order(model), [0]
    for tensor in tensors.values():
        ends.append(ends[-1] + -(-tensor.nbytes // ALIGN) * ALIGN)
    buffer, views = torch.zeros(ends[-1], dtype=torch.uint8), {}
    for start, (name, tensor) in zip(ends, tensors.items(), strict=False):
        views[name] = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        views[name].copy_(tensor)
    return buffer, views


def packed_config(**changes: Any) -> K3Config:
    return tiny_k3(vision=None, num_layers=4, mla_layers=(3,), are_experts_packed=True, **changes)


def logits(model: K3Model, adapters: tuple[int, ...] | None = None) -> Tensor:
    tokens = torch.arange(T) * 5 % model.config.vocab_size
    return model(train_context(tokens, (9, T - 9), adapters=adapters))


@pytest.mark.parametrize("config", [tiny_k3(num_mtp_layers=1, is_mtp_shared=True), tiny_kimi_linear(), packed_config()])
def test_its_tensors_are_the_given_ones(config: K3Config) -> None:
    made = new_model(config, std=0.1, decay="slow")
    buffer, views = lay_out(made)
    model = model_on(config, views, torch.float32)
    for name, tensor in model.state_dict().items():
        assert tensor.untyped_storage().data_ptr() == buffer.data_ptr(), name
    assert not any(p.requires_grad for p in model.parameters())
    assert torch.equal(logits(model), logits(made))


@pytest.mark.parametrize("hidden", [48, 40])
def test_what_was_written_merged_is_merged_again_without_a_copy(hidden: int) -> None:
    """With 48 columns all groups lie end to end; with 40 the rows of some end inside the alignment and stay apart."""
    config = packed_config(hidden_size=hidden)
    made = new_model(config, std=0.1, decay="slow").merge()
    buffer, views = lay_out(made)
    model = model_on(config, views, torch.float32).merge(may_copy=False)
    merged = [t for m in model.modules() for t in (getattr(m, "_merged", None), getattr(m, "_conv_weight", None))]
    kept = [t for t in merged if t is not None]
    assert kept and all(t.untyped_storage().data_ptr() == buffer.data_ptr() for t in kept)
    wanted = [t for m in made.modules() for t in (getattr(m, "_merged", None), getattr(m, "_conv_weight", None))]
    is_whole = len(kept) == len([t for t in wanted if t is not None])
    assert is_whole == (hidden == 48)
    if is_whole:
        assert torch.equal(logits(model), logits(made))
    assert torch.allclose(logits(model), logits(made), atol=1e-5)


def test_what_does_not_fit_the_config_is_named() -> None:
    config = packed_config()
    tensors = new_model(config, std=0.1).tensors()
    name = "model.layers.1.block_sparse_moe.experts.w1_packed"
    for change, words in (
        ({name: tensors[name][:-1]}, "w1_packed"),
        ({name: tensors[name].int()}, "torch.int32"),
        ({"x.weight": tensors[name]}, "1 unexpected"),
    ):
        with pytest.raises(ShapeError, match=words):
            model_on(config, tensors | change, torch.float32)
    with pytest.raises(ShapeError, match="1 missing"):
        model_on(config, {n: t for n, t in tensors.items() if n != name}, torch.float32)


# ---- what backward keeps ------------------------------------------------------------------------------------------
def trained(config: K3Config, dtype: torch.dtype) -> tuple[K3Model, AdapterBank, Tensor]:
    """A frozen base on one buffer, with a bank that is trained."""
    made = new_model(config, dtype=dtype, std=0.1, decay="slow").merge()
    buffer, views = lay_out(made)
    model = model_on(config, views, dtype).merge(may_copy=False)
    bank = add_adapters(model, 1, 2)
    bank.install(1, random_adapter(config, 2, dtype=dtype))
    for parameter in bank.parameters():
        parameter.requires_grad_(True)
    return model, bank, buffer


def saved_by(model: K3Model, owned: set[int]) -> Iterator[Tensor]:
    """Tensors that autograd keeps and that lie in none of `owned` (data pointers of storages)."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = logits(model, (1, 1)).float().square().mean()
    loss.backward()
    return (t for t in kept if t.untyped_storage().data_ptr() not in owned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("active", [3, 1])
def test_nothing_of_a_frozen_base_is_kept_for_backward(dtype: torch.dtype, is_packed: bool, active: int) -> None:
    """Neither dequantised experts nor weights in a wider dtype: what is kept has no matrix of the base's shape.

    With one active expert there are so few pairs that the product would gather a matrix for each."""
    config = packed_config(hidden_size=48, num_active_experts=active).with_(are_experts_packed=is_packed)
    model, bank, buffer = trained(config, dtype)
    owned = {buffer.untyped_storage().data_ptr()} | {p.untyped_storage().data_ptr() for p in bank.parameters()}
    shapes = {tuple(p.shape[-2:]) for p in model.parameters() if p.dim() >= 2}
    experts = config.expert_intermediate_size, config.expert_width
    shapes |= {experts, experts[::-1]} | {shape[::-1] for shape in shapes}
    found = list(saved_by(model, owned))
    wrong = [tuple(t.shape) for t in found if t.dim() >= 2 and tuple(t.shape[-2:]) in shapes]
    assert not wrong, f"{len(wrong)} kept: {wrong[:5]}"
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in bank.parameters())


def test_gradients_of_factors_are_those_of_an_unmerged_dense_base() -> None:
    """Recomputing what was not kept gives the same: MXFP4 against the same values dense, merged against not."""
    config = packed_config(hidden_size=48)
    packed, bank, _ = trained(config, torch.float64)
    dense_config = config.with_(are_experts_packed=False)
    dense = new_model(dense_config, dtype=torch.float64, std=0.1)
    tensors = packed.tensors()
    for name, place in dense.tensors().items():
        with torch.no_grad():
            if name in tensors:
                place.copy_(tensors[name])
            else:
                experts = packed.get_submodule(name.rpartition(".")[0])
                weights = experts.weights().take(torch.arange(config.num_experts), torch.float64)  # type: ignore[operator]
                place.copy_(dict(zip(("w1", "w3", "w2"), weights, strict=True))[name.rpartition(".")[2]])
    other = add_adapters(dense, 1, 2)
    other.install(1, random_adapter(config, 2, dtype=torch.float64))
    for each, model in ((bank, packed), (other, dense)):
        for parameter in each.parameters():
            parameter.requires_grad_(True)
        logits(model, (1, 1)).square().mean().backward()
    for (name, one), two in zip(bank.factors.items(), other.factors.values(), strict=True):
        for a, b in ((one.a, two.a), (one.b, two.b)):
            assert a.grad is not None and b.grad is not None
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12, msg=name)
