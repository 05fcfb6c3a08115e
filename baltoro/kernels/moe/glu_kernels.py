"""Triton kernel of the gated activations. Importing this needs triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def glu_kernel(
    gate, up, out, gate_row, up_row, width, beta, linear_beta,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (stretch of a row, row). KIND: 0 SiLU, 1 SiTU, 2 SiTU with `up` as it is. All in fp32, rounded once."""
    row, d = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = d < width
    if PDL:
        gdc_launch_dependents()  # the product behind has its weights to ask for meanwhile
        gdc_wait()
    a = tl.load(gate + row * gate_row + d, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(up + row * up_row + d, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        value = a * tl.sigmoid(a) * b
    else:  # tanh(x) = 2 sigmoid(2x) - 1
        value = beta * (2.0 * tl.sigmoid(2.0 * a / beta) - 1.0) * tl.sigmoid(a)
        if KIND == 1:
            b = linear_beta * (2.0 * tl.sigmoid(2.0 * b / linear_beta) - 1.0)
        value = value * b
    tl.store(out + row * width + d, value.to(out.dtype.element_ty), mask=mask)
