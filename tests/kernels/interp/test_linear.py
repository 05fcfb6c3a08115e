"""Products of few rows, and the router's merged product, under the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.kernels.linear import fast, reference
from tests.kernels.tolerances import TOLERANCES

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def assert_near(got: Tensor, expected: Tensor, op: str, dtype: torch.dtype) -> None:
    gap = float((got.double() - expected).norm() / expected.norm())
    assert gap < TOLERANCES[op][str(dtype).removeprefix("torch.")], gap


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_few_rows(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 700).to(dtype), torch.randn(21, 700).to(dtype)
    assert_near(fast.linear(x, weight), reference.linear(x.double(), weight.double()), "linear", dtype)


@DTYPES
def test_a_norm_before_it_is_folded_in(dtype: torch.dtype) -> None:
    x, gain, weight = (torch.randn(shape).to(dtype) for shape in ((2, 700), (700,), (13, 700)))
    expected = reference.norm_linear(x.double(), gain.double(), weight.double(), 1e-5)
    assert_near(fast.norm_linear(x, gain, weight, 1e-5), expected, "norm_linear", dtype)


@DTYPES
@pytest.mark.parametrize("rows", [1, 8, 9, 33])
def test_logits_stay_in_fp32_beside_the_other_columns(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 200)[:, :160].to(dtype), torch.randn(11 + 70, 160).to(dtype)
    logits, rest = fast.router_linear(x, weight, 11)
    assert logits.dtype == torch.float32 and rest.dtype == dtype
    expected, expected_rest = reference.router_linear(x.double(), weight.double(), 11)
    assert_near(logits, expected, "router_linear_logits", dtype)
    assert_near(rest, expected_rest, "router_linear", dtype)


def test_what_the_kernels_do_not_take_goes_to_the_reference() -> None:
    x, weight = torch.randn(2, 64, dtype=torch.float64), torch.randn(5, 64, dtype=torch.float64)
    assert torch.equal(fast.linear(x, weight), reference.linear(x, weight))
    wanted = torch.randn(2, 64, requires_grad=True)
    assert fast.linear(wanted, weight.float()).requires_grad


def test_sums_are_cut_into_logits_and_the_rest() -> None:
    sums = torch.randn(3, 1500)
    logits, rest = fast.cut_sums(sums, 400, torch.float32)
    assert torch.equal(logits, sums[:, :400]) and torch.equal(rest, sums[:, 400:])
