"""The depth mix under the interpreter: one launch, and in two phases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.attnres import fast, fused
from baltoro.kernels.attnres.reference import mix
from tests.kernels.tolerances import TOLERANCES

EPS, NORM_EPS = 1e-3, 1e-2
DTYPES = ["float32", "bfloat16"]


def gap(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def bank_of(num: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """[num, tokens, width] inside a larger buffer of NaN: rows of other sources and tokens must not matter."""
    whole = torch.full((num + 1, tokens + 2, width), float("nan"), dtype=dtype)
    whole[:num, 1:-1] = torch.randn(num, tokens, width).to(dtype) * (1 + torch.arange(num).view(-1, 1, 1))
    return whole[:num, 1:-1]


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if one is None else one.double() for one in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "tokens", "width"), [(1, 1, 16), (2, 5, 48), (9, 3, 300)])
@torch.no_grad()
def test_mix(num: int, tokens: int, width: int, dtype: str) -> None:
    sources, query = bank_of(num, tokens, width, getattr(torch, dtype)), torch.randn(width)
    got = fast.mix(sources, query, EPS)
    assert got.dtype == sources.dtype
    assert gap(got, mix(sources.double(), query.double(), EPS)) < TOLERANCES["attnres_mix"][dtype]


def test_mix_under_autograd_has_a_gradient() -> None:
    sources, query = torch.randn(3, 2, 8, requires_grad=True), torch.randn(8)
    fast.mix(sources, query, EPS).sum().backward()
    assert sources.grad is not None and sources.grad.abs().sum() > 0


def test_every_form_has_a_gradient_where_one_is_wanted() -> None:
    """A kernel without a backward would cut the graph without a word: what is below would never be trained."""
    gain, query = torch.ones(8), torch.randn(8)
    bank, prefix, update = (torch.randn(*shape, requires_grad=True) for shape in ((3, 2, 8), (2, 8), (2, 8)))
    part, lse = fast.scan_bank(bank, query.unsqueeze(0), EPS)
    for found in (fast.read(bank, prefix, update, query, gain, EPS, NORM_EPS),
                  fast.fold(part[0], lse[0], prefix, update, query, gain, EPS, NORM_EPS)):  # fmt: skip
        grads = torch.autograd.grad(found[1].square().sum(), (bank, prefix, update), retain_graph=True)
        assert all(grad.abs().sum() > 0 for grad in grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pending", ["both", "prefix", "update"])
@torch.no_grad()
def test_read_adds_mixes_and_norms(pending: str, dtype: str) -> None:
    num, tokens, width, kind = 4, 3, 72, getattr(torch, dtype)
    bank, query, gain = bank_of(num, tokens, width, kind), torch.randn(width), torch.rand(width) + 0.5
    prefix, update = (torch.randn(tokens, width).to(kind) for _ in range(2))
    rows = (prefix if pending != "update" else None, update if pending != "prefix" else None)
    total, out = fast.read(bank, *rows, query, gain, EPS, NORM_EPS)
    expected = fused.read(*wide(bank, *rows, query, gain), EPS, NORM_EPS)
    assert gap(out, expected[1]) < TOLERANCES["attnres_read"][dtype]
    assert gap(total, expected[0]) < TOLERANCES["attnres_read"][dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "queries", "tokens", "width"), [(1, 1, 2, 40), (8, 24, 3, 300)])
@torch.no_grad()
def test_bank_pass_and_fold_are_the_mix(num: int, queries: int, tokens: int, width: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    bank, query, gain = bank_of(num, tokens, width, kind), torch.randn(queries, width), torch.rand(width) + 0.5
    prefix, update = (torch.randn(tokens, width).to(kind) for _ in range(2))
    part, lse = fast.scan_bank(bank, query, EPS)
    exact_part, exact_lse = fused.scan_bank(bank.double(), query.double(), EPS)
    bound = TOLERANCES["attnres_fold"][dtype]
    assert gap(part, exact_part) < bound
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-5, atol=2e-5)
    for n in {0, queries - 1}:
        total, out = fast.fold(part[n], lse[n], prefix, update, query[n], gain, EPS, NORM_EPS)
        expected = fused.read(*wide(bank, prefix, update, query[n], gain), EPS, NORM_EPS)
        assert gap(total, expected[0]) < bound and gap(out, expected[1]) < bound


def test_no_tokens_and_too_many_sources() -> None:
    with torch.no_grad():
        assert fast.mix(torch.empty(3, 0, 8), torch.randn(8), EPS).shape == (0, 8)
    with pytest.raises(ShapeError, match="rows"):
        fast.scan_bank(torch.randn(17, 2, 8), torch.randn(1, 8), EPS)
