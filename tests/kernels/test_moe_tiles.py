"""Experts in tiles: every plain form reads them as the published order, gradients and adapters too; nothing mixes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from baltoro.errors import InvariantError
from baltoro.kernels.moe import device_grouped, experts, fast_experts
from baltoro.kernels.moe.permute import fits_bf16, permute_experts, published
from baltoro.kernels.moe.products import AnyExperts, ExpertWeights, Packed, TiledExperts, take
from baltoro.kernels.moe.reference import situ_glu

E, A, M, F = 5, 2, 160, 96
SITU = partial(situ_glu, beta=4.0, linear_beta=25.0)
FORMS = (experts.gathered, experts.grouped, experts.everywhere, experts.expert_product)
ENTRIES = (*FORMS, device_grouped.expert_product, fast_experts.expert_product)


def packed(num: int = E, width: int = M, inner: int = F) -> ExpertWeights:
    """Every element code; scales over eight binades."""

    def matrix(rows: int, columns: int) -> Packed:
        codes = torch.randint(0, 256, (num, rows, columns // 2), dtype=torch.uint8)
        return Packed(codes, torch.randint(118, 126, (num, rows, columns // 32), dtype=torch.uint8))

    return ExpertWeights(w1=matrix(inner, width), w3=matrix(inner, width), w2=matrix(width, inner))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_of_tiles_are_those_of_the_bytes(dtype: torch.dtype) -> None:
    one, ids = packed(), torch.tensor([3, 0, 3])
    tiled = permute_experts(one)
    assert (one.order, tiled.order) == ("published", "tiled") and tiled.fake() is tiled
    for mine, theirs in zip(tiled.take(ids, dtype), one.take(ids, dtype), strict=True):
        assert mine.dtype == dtype and torch.equal(mine, theirs)
    for name in ("w1", "w3", "w2"):
        matrix, wanted = getattr(tiled, name), getattr(one, name)
        assert matrix.shape == wanted.shape and torch.equal(take(matrix, ids, dtype), take(wanted, ids, dtype))
        back = published(matrix)
        assert torch.equal(back.packed, wanted.packed) and torch.equal(back.scale, wanted.scale)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("tokens", [1, 7])
def test_forms_read_tiles_as_the_published_order(entry: object, tokens: int) -> None:
    one, z = packed(), torch.randn(tokens, M, dtype=torch.float64)
    ids, shares = torch.rand(tokens, E).topk(A).indices, torch.rand(tokens, A, dtype=torch.float64)
    product = partial(entry, z, ids, shares, activation=SITU)  # type: ignore[arg-type]
    assert torch.equal(product(permute_experts(one)), product(one))


def test_gradients_through_tiles_are_those_of_the_published_order() -> None:
    one = packed()
    ids, shares, z = torch.rand(6, E).topk(A).indices, torch.rand(6, A).double(), torch.randn(6, M).double()

    def gradient(weights: AnyExperts) -> Tensor:
        x = z.clone().requires_grad_()
        experts.expert_product(x, ids, shares, weights, activation=SITU).square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(permute_experts(one)), gradient(one))


def test_orders_do_not_mix() -> None:
    one = packed()
    tiled = permute_experts(one)
    with pytest.raises(InvariantError, match="in tiles among"):
        ExpertWeights(w1=tiled.w1, w3=one.w3, w2=one.w2)  # type: ignore[arg-type]
    assert isinstance(one.w1, Packed) and isinstance(one.w2, Packed)
    with pytest.raises(InvariantError, match="instead of"):
        TiledExperts(one.w1.packed, one.w1.scale, one.w2.packed, one.w2.scale, M, F)
    with pytest.raises(TypeError, match="published order"):
        permute_experts(tiled)  # type: ignore[arg-type]


def test_scales_that_bf16_products_do_not_take_are_seen() -> None:
    one = packed(2)
    assert fits_bf16(one) and isinstance(one.w2, Packed)
    one.w2.scale[1, 5, 0] = 161
    assert not fits_bf16(one)
