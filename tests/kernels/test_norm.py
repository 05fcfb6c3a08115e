"""RMSNorm, the gated norm, and the accumulate dtype."""

from __future__ import annotations

import torch

from baltoro.kernels.norm.reference import gated_rms_norm, l2_norm, rms_norm
from baltoro.kernels.precision import acc_dtype


def test_float64_accumulates_in_float64_and_everything_else_in_float32() -> None:
    assert acc_dtype(torch.float64) == torch.float64
    assert {acc_dtype(d) for d in (torch.float32, torch.bfloat16, torch.float16)} == {torch.float32}


def test_rms_norm_is_the_formula() -> None:
    x, weight = torch.randn(5, 3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    expected = x / ((x**2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, atol=1e-13, rtol=0)


def test_rms_norm_rounds_to_the_input_dtype_before_the_weight() -> None:
    x, weight = torch.randn(64, 33).bfloat16(), torch.randn(33).bfloat16()
    wide = x.float()
    scaled = (wide * torch.rsqrt((wide**2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    y = rms_norm(x, weight, 1e-5)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, scaled * weight)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6), torch.zeros(2, 4))


def test_gated_norm_is_the_formula_and_rounds_once() -> None:
    o, gate, weight = torch.randn(6, 3, 5), torch.randn(6, 3, 5).bfloat16(), torch.randn(5).bfloat16()
    wide = o.double()
    expected = wide / ((wide**2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() * torch.sigmoid(gate.double())
    y = gated_rms_norm(o, gate, weight, 1e-5, torch.bfloat16)
    assert y.dtype == torch.bfloat16
    # one rounding to bfloat16: half a unit in the last place
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(
        gated_rms_norm(o, gate, weight, 1e-5, torch.float32).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_gated_norm_has_the_gradient_of_the_formula() -> None:
    o, gate = (torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: gated_rms_norm(*a, 1e-5, torch.float64), (o, gate, weight))


def test_norms_have_the_gradient_of_their_formulas() -> None:
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-2), (x, weight))
    assert torch.autograd.gradcheck(lambda x: l2_norm(x, 1e-2), (x,))


def test_norms_are_the_same_with_and_without_gradients() -> None:
    x, gate, weight = torch.randn(5, 8).bfloat16(), torch.randn(5, 8), torch.randn(8).bfloat16()

    def run() -> tuple[torch.Tensor, ...]:
        return rms_norm(x, weight, 1e-5), l2_norm(x), gated_rms_norm(x, gate, weight, 1e-5, torch.bfloat16)

    with torch.no_grad():
        plain = run()
    for a, b in zip(plain, run(), strict=True):
        assert torch.equal(a, b)
