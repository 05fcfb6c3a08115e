"""MXFP4: E2M1 elements, one E8M0 scale per 32 consecutive columns. Pack, unpack, fake quantisation.

Layout (as published): byte j of a row holds column 2j in its low nibble and column 2j+1 in its high nibble; element
code bit 3 is the sign, codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; scale byte s means 2^(s - 127), 255 is NaN.
Quantise rule (OCP MX): scale exponent = floor(log2(amax)) - 2 clamped to [-127, 127]; elements rounded to nearest,
ties to the even code, saturating at 6. A block of zeros gets scale byte 127 (the value 1).
Every dequantised value is exact in bfloat16 and float32. Source: spec/k3.md section 5.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.precision import acc_dtype

BLOCK = 32
BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX_EXPONENT = 2  # of the largest element, 6 = 1.5 * 2^2
WIDER = {2: torch.int32, 4: torch.int64, 8: torch.complex128}  # by item size, a dtype that holds two items


def quantise(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [..., C], finite, C a multiple of 32 -> packed uint8 [..., C/2], scale uint8 [..., C/32]."""
    scaled, byte = _scaled(w)
    fine, middle, coarse = _steps(scaled)
    codes = fine.add_(middle).add_(coarse).to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
    return pack(codes.flatten(-2)), byte.to(torch.uint8)


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed uint8 [..., C/2], scale uint8 [..., C/32] -> [..., C] in `dtype`."""
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * BLOCK:
        raise ShapeError(f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not belong together")
    values = _byte_table(dtype, packed.device).index_select(0, packed.flatten().int()).view(dtype)
    values = values.view(*scale.shape, BLOCK) * scale_values(scale, dtype).unsqueeze(-1)
    return values.flatten(-2)


def fake(w: Tensor) -> Tensor:
    """Quantise and dequantise: what the packed weight would hold, in w.dtype. The gradient is the identity."""
    result: Tensor = _Fake.apply(w)  # type: ignore[no-untyped-call]
    return result


def pack(codes: Tensor) -> Tensor:
    """uint8 element codes [..., C] -> bytes [..., C/2]; even columns in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [..., C/2] -> uint8 element codes [..., C]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def scale_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(byte - 127) for E8M0 bytes, NaN for 255, in `dtype`."""
    return _power_table(dtype, scale.device).index_select(0, scale.flatten().int()).view(scale.shape)


@cache
def _power_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - BIAS)
    powers[255] = float("nan")
    return powers.to(dtype=dtype, device=device)


@cache
def _byte_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two elements of every byte, as one number of twice their width: one look-up yields both."""
    positive = torch.tensor(MAGNITUDES, dtype=dtype, device=device)
    elements = torch.cat((positive, -positive))
    pairs = torch.stack((elements.repeat(16), elements.repeat_interleave(16)), dim=-1)
    return pairs.view(WIDER[dtype.itemsize]).flatten()


def _scaled(w: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [..., C/32, 32] divided by their scales, in the accumulate dtype, and the scale bytes, int32."""
    if w.shape[-1] % BLOCK:
        raise ShapeError(f"MXFP4 needs a last dimension in multiples of {BLOCK}, got {tuple(w.shape)}")
    blocks = torch.unflatten(w, -1, (-1, BLOCK)).to(acc_dtype(w.dtype))
    amax = blocks.abs().amax(-1)
    _, exponent = torch.frexp(amax)  # amax = m * 2^exponent with m in [0.5, 1)
    byte = (exponent - 1 - MAX_EXPONENT + BIAS).clamp_(0, 254).masked_fill_(amax == 0, BIAS)
    return blocks * scale_values(2 * BIAS - byte, blocks.dtype).unsqueeze(-1), byte


def _steps(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many steps of 1/2 (up to 2), of 1 (from 2 to 4) and of 2 (from 4 to 6) scaled values take.

    Their sum is the element code. torch.round takes ties to even; the parity of the steps is that of the code, so this
    is the rounding of the format. Plain arithmetic, because selecting costs ten times as much on a CPU.
    """
    size = x.abs()
    fine = (size * 2).round_().clamp_(max=4)
    middle = size.round().clamp_(2, 4).sub_(2)
    return fine, middle, size.div_(2).round_().clamp_(2, 3).sub_(2)


class _Fake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        scaled, byte = _scaled(w)
        fine, middle, coarse = _steps(scaled)
        size = middle.add_(fine, alpha=0.5).add_(coarse, alpha=2)
        values = torch.copysign(size, scaled).mul_(scale_values(byte, scaled.dtype).unsqueeze(-1))
        return values.flatten(-2).to(w.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]
