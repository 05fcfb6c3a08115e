"""MXFP8: float8 e4m3fn elements, one E8M0 scale per 32 consecutive columns. For expert inputs.

Rule: scale byte = clamp(ceil(log2(amax / 448)) + 127, 0, 254), elements = x / 2^(byte - 127) rounded to nearest even.
No element exceeds 448, so nothing saturates. A block of zeros gets byte 0. Source: spec/k3.md section 5.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.quant.mxfp4 import BIAS, BLOCK, scale_values

MAX_FRACTION = 0.875  # 448 = 0.875 * 2^9
MAX_EXPONENT = 9


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., C], finite, C a multiple of 32 -> elements float8_e4m3fn [..., C], scale uint8 [..., C/32]."""
    if x.shape[-1] % BLOCK:
        raise ShapeError(f"MXFP8 needs a last dimension in multiples of {BLOCK}, got {tuple(x.shape)}")
    blocks = torch.unflatten(x, -1, (-1, BLOCK)).to(acc_dtype(x.dtype))
    amax = blocks.abs().amax(-1)
    fraction, exponent = torch.frexp(amax)  # amax = fraction * 2^exponent with fraction in [0.5, 1)
    power = exponent - MAX_EXPONENT + (fraction > MAX_FRACTION).int()
    byte = (power + BIAS).clamp_(0, 254).masked_fill_(amax == 0, 0)
    elements = (blocks * scale_values(2 * BIAS - byte, blocks.dtype).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return elements.flatten(-2), byte.to(torch.uint8)


def dequantise(elements: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """elements float8_e4m3fn [..., C], scale uint8 [..., C/32] -> [..., C] in `dtype`."""
    acc = acc_dtype(dtype)
    table = _element_table(acc, elements.device)  # a look-up: the conversion is several times slower on a CPU
    values = table.index_select(0, elements.flatten().view(torch.uint8).int()).view(*scale.shape, BLOCK)
    return values.mul_(scale_values(scale, acc).unsqueeze(-1)).flatten(-2).to(dtype)


@cache
def _element_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(dtype)


def fake(x: Tensor) -> Tensor:
    """Quantise and dequantise, in x.dtype. The gradient is the identity."""
    result: Tensor = _Fake.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Fake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return dequantise(*quantise(x), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]
