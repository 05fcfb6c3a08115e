"""Products of few rows in Triton: each weight is read once, in wide loads, and summed in fp32.

In and out: as `reference`. For bf16 (and float32) rows without gradients; more rows than MAX_ROWS of a plain product go
to the framework's matrix product, which is bound by bytes there too. Source: spec/kernels.md E.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.linear import reference

# To be set by `baltoro bench kernels` on the device: the spec expects a gain up to about 4 rows.
MAX_ROWS = 4
# Rows of one launch without matrix units; sums of 8 rows still fit the registers.
FEW_ROWS = 8
# Above, logits and the rest are two products of the framework.
MAX_MERGED_ROWS = 512


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I], weight [O, I] -> [T, O]."""
    if x.dim() != 2 or len(x) > MAX_ROWS or not _fits(x, weight):
        return reference.linear(x, weight)
    out = x.new_empty(len(x), len(weight))
    few_rows(x, weight, out, out, 0)
    return out


def norm_linear(x: Tensor, gain: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, I], gain [I], weight [O, I] -> [T, O]; the normed x is never rounded, nor written."""
    if x.dim() != 2 or len(x) > MAX_ROWS or not _fits(x, weight):
        return reference.norm_linear(x, gain, weight, eps)
    out = x.new_empty(len(x), len(weight))
    few_rows(x, weight, out, out, 0, gain=gain, eps=eps)
    return out


def router_linear(x: Tensor, weight: Tensor, num_logits: int) -> tuple[Tensor, Tensor]:
    """x [T, D], weight [num_logits + O, D] -> fp32 logits [T, num_logits], [T, O] in x.dtype: one launch."""
    if x.dim() != 2 or len(x) > MAX_MERGED_ROWS or not _fits(x, weight):
        return reference.router_linear(x, weight, num_logits)
    logits = torch.empty(len(x), num_logits, dtype=torch.float32, device=x.device)
    rest = x.new_empty(len(x), len(weight) - num_logits)
    product = few_rows if len(x) <= FEW_ROWS else many_rows
    product(x, weight, logits, rest, num_logits)
    return logits, rest


def few_rows(
    x: Tensor,
    weight: Tensor,
    first: Tensor,
    rest: Tensor,
    num_first: int,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Write the first `num_first` columns of the product to `first`, the others to `rest`. At most FEW_ROWS rows."""
    from triton import cdiv, next_power_of_2

    from baltoro.kernels.linear import kernels

    rows = next_power_of_2(max(1, len(x)))
    block_n = 8 if rows <= 2 else 4
    if len(x):
        kernels.few_rows[(cdiv(len(weight), block_n),)](
            x,
            weight,
            x if gain is None else gain,
            first,
            rest,
            len(x),
            num_first,
            *weight.shape,
            x.stride(0),
            eps,
            ROWS=rows,
            BLOCK_N=block_n,
            BLOCK_K=min(512, next_power_of_2(weight.shape[1])),
            HAS_NORM=gain is not None,
            num_warps=4,
        )


def many_rows(x: Tensor, weight: Tensor, first: Tensor, rest: Tensor, num_first: int) -> None:
    """As `few_rows`, through the matrix unit, for any number of rows."""
    from triton import cdiv, knobs

    from baltoro.kernels.linear import kernels

    block_m, block_n = (16 if len(x) <= 16 else 64), 64
    kernels.many_rows[(cdiv(len(x), block_m), cdiv(len(weight), block_n))](
        x,
        weight,
        first,
        rest,
        len(x),
        num_first,
        *weight.shape,
        x.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=64,
        INTERPRET=knobs.runtime.interpret,
        num_warps=4,
        num_stages=4,
    )


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take it: no gradients wanted, one dtype of 2 or 4 bytes, rows without holes."""
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    is_plain = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float32)
    return not wants_gradient and is_plain and x.stride(-1) == 1 and weight.is_contiguous()
