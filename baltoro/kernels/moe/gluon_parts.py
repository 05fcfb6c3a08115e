# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""What the forms of the grouped product in Gluon share: numbers of a half's words, activation, the way to memory.

The interpreter does not know Gluon. Imported by `gluon_few` and `gluon_ring`; needs triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baltoro.kernels.moe.weave_text import conversion, registers

HALF: gl.constexpr = gl.constexpr(64)
FIRST: gl.constexpr = gl.constexpr(conversion((0, 1, 4, 5)))
SECOND: gl.constexpr = gl.constexpr(conversion((2, 3, 6, 7)))
REGISTERS: gl.constexpr = gl.constexpr(registers(4))


@gluon.jit
def assembled(a0, a1, a2, a3, b0, b1, b2, b3, A: gl.constexpr):
    """Numbers of two words, by pair and lane, each [rows, 8] -> wgmma's operand [rows, 64]; no thread sends any."""
    rows: gl.constexpr = a0.shape[0]
    # [rows, 8, word of two, pair, lane]; the first dimension of 8 is (block of the unit) (two words)
    value = gl.join(gl.join(gl.join(a0, b0), gl.join(a2, b2)), gl.join(gl.join(a1, b1), gl.join(a3, b3)))
    value = gl.permute(gl.reshape(value, [rows, 4, 4, 2, 2]), [0, 2, 3, 1, 4])
    return gl.convert_layout(gl.reshape(value, [rows, 64]), A, assert_trivial=True)


@gluon.jit
def half_unit(one, two, factor, TEXT: gl.constexpr, A: gl.constexpr):
    """Two pairs of both words as an operand: FIRST or SECOND."""
    a0, a1, a2, a3, b0, b1, b2, b3 = gl.inline_asm_elementwise(
        TEXT, REGISTERS, [one, two, factor], dtype=(gl.bfloat16,) * 8, is_pure=False, pack=1
    )
    return assembled(a0, a1, a2, a3, b0, b1, b2, b3, A)


@gluon.jit
def kept(value, A: gl.constexpr):
    """Itself: an operand's registers stay its own up to here, that is, until what reads them has been waited for."""
    return gl.inline_asm_elementwise("", "=r,0", [value], dtype=gl.bfloat16, is_pure=False, pack=2)


@gluon.jit
def activated(gate, up, beta, linear_beta, KIND: gl.constexpr):
    """As `tile_kernels.activated`."""
    share = 1.0 / (1.0 + gl.exp(-gate))
    if KIND == 0:
        out = gate * share * up
    else:
        out = beta * bounded(gate / beta) * share
        if KIND == 1:
            out = out * (linear_beta * bounded(up / linear_beta))
        else:
            out = out * up
    return out


@gluon.jit
def bounded(x):
    """tanh."""
    return 2.0 / (1.0 + gl.exp(-2.0 * x)) - 1.0


@gluon.jit
def leave(
    sums, first, to, N: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr,
    IS_FIRST: gl.constexpr, IS_ORDERED: gl.constexpr,
):  # fmt: skip
    """Sums [BLOCK, N] to rows from `first` on of out [pairs, width], activated; or, not IS_FIRST, where the pairs are.
    IS_ORDERED: columns as `tile_moves.arrange` would put them for the second product."""
    out, order, end, block, width, beta, linear_beta = to
    AT: gl.constexpr = gl.BlockedLayout([2 if IS_ORDERED else 8, 1], [8, 4], [1, WARPS], [0, 1])
    row = first + gl.arange(0, N, gl.SliceLayout(0, AT))
    if IS_FIRST:
        both = gl.permute(gl.reshape(sums, [BLOCK // 16, 2, 8, N]), [0, 2, 3, 1])
        gate, up = gl.split(both)
        value = activated(gate * 4294967296.0, up * 4294967296.0, beta, linear_beta, KIND)
        value = gl.convert_layout(gl.reshape(value.to(out.dtype.element_ty), [BLOCK // 2, N]), AT)
        column = block * (BLOCK // 2) + gl.arange(0, BLOCK // 2, gl.SliceLayout(1, AT))
        if IS_ORDERED:
            place = column % 32 // 16 * 64 + column % 16 // 2 * 8 + column % 128 // 32 * 2 + column % 2
            column = gl.max_contiguous(gl.multiple_of(column // 128 * 128 + place, 2), 2)
        at, is_there = (
            row.to(gl.int64)[None, :] * width + column[:, None],
            (row < end)[None, :] & (column >= 0)[:, None],
        )
    else:
        value = gl.convert_layout((sums * 4294967296.0).to(out.dtype.element_ty), AT)
        column = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, AT))
        pair = gl.load(order + row, mask=row < end, other=0)
        at, is_there = pair[None, :] * width + column[:, None], (row < end)[None, :] & (column < width)[:, None]
    gl.store(out + at, value, mask=is_there)
