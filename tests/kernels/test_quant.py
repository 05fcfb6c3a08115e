"""MXFP4 and MXFP8 by hand-worked cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.quant import mxfp4, mxfp8

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def block(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """One block of 32 that begins with `values`, zeros after."""
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]], dtype=dtype)


# ---- MXFP4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_example_byte_of_the_format_notes(dtype: torch.dtype) -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 3] = 0x2A
    w = mxfp4.dequantise(packed, torch.tensor([[128]], dtype=torch.uint8), dtype)
    assert w.dtype == dtype
    assert w[0, 6] == -2.0 and w[0, 7] == 2.0 and w.abs().sum() == 4.0


def test_every_code_has_its_value_and_columns_go_low_nibble_first() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).view(1, 32)
    w = mxfp4.dequantise(mxfp4.pack(codes), torch.tensor([[127]], dtype=torch.uint8), torch.float32)
    assert w[0, :16].tolist() == E2M1 + [-x for x in E2M1]
    assert torch.signbit(w[0, 8])


def test_pack_and_unpack_are_inverse_on_every_byte() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert torch.equal(mxfp4.pack(mxfp4.unpack(packed)), packed)


@pytest.mark.parametrize("byte", [1, 100, 127, 128, 200, 252])
def test_every_representable_value_round_trips_bit_identically(byte: int) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).view(1, 32)
    packed, scale = mxfp4.pack(codes), torch.tensor([[byte]], dtype=torch.uint8)
    again, again_scale = mxfp4.quantise(mxfp4.dequantise(packed, scale, torch.float32))
    assert torch.equal(again, packed)
    assert torch.equal(again_scale, scale)


def test_values_survive_a_round_trip_whatever_the_largest_of_the_block_is() -> None:
    packed = torch.randint(0, 256, (6, 5, 48), dtype=torch.uint8)
    packed[0] &= 0x33  # no element above 1.5: the scale of the round trip differs, the values do not
    scale = torch.randint(90, 160, (6, 5, 3), dtype=torch.uint8)
    w = mxfp4.dequantise(packed, scale, torch.float32)
    assert torch.equal(mxfp4.dequantise(*mxfp4.quantise(w), torch.float32), w)
    assert torch.equal(mxfp4.dequantise(packed, scale, torch.bfloat16).float(), w)


def test_quantise_rounds_to_nearest_with_ties_to_the_even_code() -> None:
    # 4 sets the scale to 1; ties: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4
    cases = [(4.0, 4.0), (0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0)]
    cases += [(0.26, 0.5), (0.74, 0.5), (1.2, 1.0), (1.3, 1.5), (2.6, 3.0), (3.4, 3.0), (5.1, 6.0), (4.9, 4.0)]
    w = block(*[x for x, _ in cases], *[-x for x, _ in cases])
    packed, scale = mxfp4.quantise(w)
    assert scale.tolist() == [[127]]
    found = mxfp4.dequantise(packed, scale, torch.float32)[0, : 2 * len(cases)].tolist()
    assert found == [y for _, y in cases] + [-y for _, y in cases]


def test_tie_between_four_and_six_goes_to_four_and_more_than_six_saturates() -> None:
    packed, scale = mxfp4.quantise(block(7.9, 5.0, -5.0, 6.5, -7.9))
    assert scale.tolist() == [[127]]
    assert mxfp4.dequantise(packed, scale, torch.float32)[0, :5].tolist() == [6.0, 4.0, -4.0, 6.0, -6.0]


@pytest.mark.parametrize(("amax", "byte"), [(4.0, 127), (7.99, 127), (8.0, 128), (3.99, 126), (1.0, 125), (0.1, 121)])
def test_scale_exponent_is_that_of_the_largest_less_two(amax: float, byte: int) -> None:
    assert mxfp4.quantise(block(0.01, -amax))[1].tolist() == [[byte]]


def test_each_block_of_32_columns_has_its_own_scale() -> None:
    w = torch.cat([block(4.0), block(0.0), block(-32.0)], dim=-1)
    packed, scale = mxfp4.quantise(w)
    assert packed.shape == (1, 48) and scale.tolist() == [[127, 127, 130]]
    assert torch.equal(mxfp4.dequantise(packed, scale, torch.float32), w)


def test_zeros_give_the_scale_one_and_tiny_or_huge_values_stay_finite() -> None:
    packed, scale = mxfp4.quantise(torch.zeros(2, 64))
    assert torch.equal(packed, torch.zeros_like(packed)) and (scale == 127).all()
    for value, byte in ((1e-39, 0), (3e38, 252)):
        packed, scale = mxfp4.quantise(block(value))
        assert scale.tolist() == [[byte]]
        assert mxfp4.dequantise(packed, scale, torch.float64).isfinite().all()


def test_scale_byte_255_is_nan() -> None:
    w = mxfp4.dequantise(torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8), torch.float32)
    assert w.isnan().all()


def test_error_of_quantising_is_at_most_a_quarter_of_the_largest_of_its_block() -> None:
    # worst case: just under 8 saturates at 6
    w = torch.randn(64, 96, dtype=torch.float64)
    error = (mxfp4.fake(w) - w).abs().unflatten(-1, (-1, 32)).amax(-1)
    assert (error <= w.abs().unflatten(-1, (-1, 32)).amax(-1) / 4).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fake_mxfp4_is_the_dequantised_value_with_identity_gradient(dtype: torch.dtype) -> None:
    w = torch.randn(3, 64, dtype=dtype).requires_grad_()
    seed = torch.randn(3, 64, dtype=dtype)
    y = mxfp4.fake(w)
    assert torch.equal(y, mxfp4.dequantise(*mxfp4.quantise(w.detach()), dtype))
    assert torch.equal(mxfp4.fake(y), y)
    assert torch.equal(torch.autograd.grad(y, w, seed)[0], seed)


def test_mxfp4_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ShapeError):
        mxfp4.quantise(torch.zeros(2, 48))
    with pytest.raises(ShapeError):
        mxfp4.dequantise(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), torch.float32)


# ---- MXFP8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amax", "byte"), [(448.0, 127), (449.0, 128), (447.0, 127), (224.0, 126), (225.0, 127), (1.0, 119), (0.875, 118)]
)
def test_mxfp8_scale_is_the_smallest_power_that_needs_no_saturation(amax: float, byte: int) -> None:
    elements, scale = mxfp8.quantise(block(0.001, -amax))
    assert scale.tolist() == [[byte]]
    assert elements.float().abs().max() <= 448.0


def test_mxfp8_rounds_to_nearest_even_at_three_mantissa_bits() -> None:
    # 448 sets the scale to 1; between 1 and 2 the step is 1/8, between 256 and 448 it is 32
    cases = [(448.0, 448.0), (1.0625, 1.0), (1.1875, 1.25), (1.07, 1.125), (300.0, 288.0), (-304.0, -320.0), (0.0, 0.0)]
    elements, scale = mxfp8.quantise(block(*[x for x, _ in cases]))
    assert elements.dtype == torch.float8_e4m3fn and scale.dtype == torch.uint8
    assert mxfp8.dequantise(elements, scale, torch.float32)[0, :7].tolist() == [y for _, y in cases]


def test_mxfp8_scales_apply_per_block_of_32() -> None:
    x = torch.cat([block(448.0, 1.0), block(896.0, 2.0)], dim=-1)
    elements, scale = mxfp8.quantise(x)
    assert scale.tolist() == [[127, 128]]
    assert torch.equal(mxfp8.dequantise(elements, scale, torch.float32), x)


def test_mxfp8_of_zeros_is_zero_with_byte_zero() -> None:
    elements, scale = mxfp8.quantise(torch.zeros(1, 32))
    assert scale.tolist() == [[0]]
    assert torch.equal(mxfp8.dequantise(elements, scale, torch.float32), torch.zeros(1, 32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fake_mxfp8_is_close_with_identity_gradient(dtype: torch.dtype) -> None:
    x = torch.randn(5, 64, dtype=dtype).requires_grad_()
    seed = torch.randn(5, 64, dtype=dtype)
    y = mxfp8.fake(x)
    assert y.dtype == dtype and torch.equal(mxfp8.fake(y), y)
    # half a step of a 3-bit mantissa, or half the smallest step of the block
    torch.testing.assert_close(y, x, rtol=2**-4, atol=float(x.detach().abs().max()) * 2**-16)
    assert torch.equal(torch.autograd.grad(y, x, seed)[0], seed)


def test_mxfp8_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ShapeError):
        mxfp8.quantise(torch.zeros(2, 33))
