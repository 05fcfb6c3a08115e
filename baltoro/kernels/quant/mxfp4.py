"""MXFP4: E2M1 elements, one E8M0 scale per 32 consecutive columns. Pack, unpack, fake quantisation.

Layout (as published): byte j of a row holds column 2j in its low nibble and column 2j+1 in its high nibble; element
code bit 3 is the sign, codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; scale byte s means 2^(s - 127), 255 is NaN.
Quantise rule (OCP MX): scale exponent = floor(log2(amax)) - 2 clamped to [-127, 127]; elements rounded to nearest,
ties to the even code, saturating at 6. A block of zeros gets scale byte 127 (the value 1).
Every dequantised value is exact in bfloat16 and float32. Source: spec/k3.md section 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.precision import acc_dtype

BLOCK = 32
BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX_EXPONENT = 2  # of the largest element, 6 = 1.5 * 2^2


def quantise(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [..., C], finite, C a multiple of 32 -> packed uint8 [..., C/2], scale uint8 [..., C/32]."""
    blocks = _blocks(w).to(acc_dtype(w.dtype))
    amax = blocks.abs().amax(-1)
    _, exponent = torch.frexp(amax)  # amax = m * 2^exponent with m in [0.5, 1)
    byte = (exponent - 1 - MAX_EXPONENT + BIAS).clamp(0, 254)
    byte = torch.where(amax == 0, BIAS, byte)
    codes = _encode(torch.ldexp(blocks, (BIAS - byte).unsqueeze(-1)))
    return pack(codes.flatten(-2)), byte.to(torch.uint8)


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed uint8 [..., C/2], scale uint8 [..., C/32] -> [..., C] in `dtype`."""
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * BLOCK:
        raise ShapeError(f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not belong together")
    values = element_table(dtype, packed.device)[unpack(packed).long()]
    return (torch.unflatten(values, -1, (-1, BLOCK)) * scale_values(scale, dtype).unsqueeze(-1)).flatten(-2)


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


def element_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The 16 element values by code."""
    positive = torch.tensor(MAGNITUDES, dtype=dtype, device=device)
    return torch.cat((positive, -positive))


def scale_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(byte - 127) for E8M0 bytes, NaN for 255, in `dtype`."""
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - BIAS)
    powers[255] = float("nan")
    return powers.to(dtype=dtype, device=scale.device)[scale.long()]


def _blocks(w: Tensor) -> Tensor:
    if w.shape[-1] % BLOCK:
        raise ShapeError(f"MXFP4 needs a last dimension in multiples of {BLOCK}, got {tuple(w.shape)}")
    return torch.unflatten(w, -1, (-1, BLOCK))


def _encode(x: Tensor) -> Tensor:
    """Scaled values -> element codes. Within a binade codes are equally spaced, and their parity is the mantissa's,
    so torch.round (ties to even) on the code is the rounding of the format."""
    size = x.abs()
    codes = torch.where(size < 2, (size * 2).round(), torch.where(size < 4, size.round() + 2, (size / 2).round() + 4))
    return codes.clamp(max=7).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


class _Fake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return dequantise(*quantise(w), w.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]
