"""Triton kernels of the norms. Importing this needs triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rms_norm_kernel(x, weight, out, x_row, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row): rounded before the gain, as the reference does, and again after it."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = d < D
    gain = tl.load(weight + d, mask=mask, other=0.0)  # older than the kernel in front
    if PDL:
        gdc_launch_dependents()  # the product behind has its weights to ask for meanwhile
        gdc_wait()
    wide = tl.load(x + row * x_row + d, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
    kind = out.dtype.element_ty
    normed = (wide * inverse).to(kind).to(tl.float32)
    tl.store(out + row * D + d, (normed * gain.to(kind).to(tl.float32)).to(kind), mask=mask)


@triton.jit(do_not_specialize=["num"])
def gated_rms_norm_kernel(
    o, gate, weight, out, o_row, o_head, gate_row, gate_head, num, eps,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (ROWS of the num = T x H rows): all in fp32, rounded once."""
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    token, head = (row // H).to(tl.int64)[:, None], (row % H)[:, None]
    mask = (row < num)[:, None] & (d < D)[None, :]
    gain = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    wide = tl.load(o + token * o_row + head * o_head + d[None, :], mask=mask, other=0.0).to(tl.float32)
    share = tl.load(gate + token * gate_row + head * gate_head + d[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)
    value = wide * inverse[:, None] * gain * tl.sigmoid(share)
    tl.store(out + row.to(tl.int64)[:, None] * D + d[None, :], value.to(out.dtype.element_ty), mask=mask)
