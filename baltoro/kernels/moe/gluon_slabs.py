# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""The kernel around the PTX of `slab_text`: its arguments, its shared memory. Launched by `slabs`; needs triton."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baltoro.kernels.moe import slab_end_text

THREADS: gl.constexpr = gl.constexpr(slab_end_text.THREADS)


@gluon.jit
def address(pointer, EACH: gl.constexpr):
    """In every thread."""
    return gl.full([THREADS], pointer.to(gl.int64), gl.int64, EACH)


@gluon.jit
def each(value, EACH: gl.constexpr):
    """The same of a number."""
    return gl.full([THREADS], value, gl.int32, EACH)


# it takes seconds to compile: no size of 1, nor one that 16 divides, has a program of its own
@gluon.jit(do_not_specialize=["num_experts", "num_units", "num_row_tiles", "width", "slab_rows"])
def slab_kernel(
    x_ptr, table_ptr, order_ptr, packed_ptr, scales_ptr, out_ptr,
    num_experts, num_units, num_row_tiles, width, slab_rows, beta, linear_beta,
    TEXT: gl.constexpr, OPERANDS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """out: slabs of hidden, or rows [., width]; grid (blocks of THREADS weight rows, tiles). x: slabs of inputs.
    PIECES of 4096 bytes of shared memory, whose beginning the text finds by its name: nothing else may need any."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [THREADS // 32], [0])
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.int32, [PIECES + 1, 1024], WORDS)
    memory.index(PIECES).store(gl.zeros([1024], gl.int32, gl.BlockedLayout([4], [32], [THREADS // 32], [0])))
    gl.inline_asm_elementwise(
        TEXT, OPERANDS,
        [
            address(x_ptr, EACH), address(table_ptr, EACH), address(order_ptr, EACH), address(packed_ptr, EACH),
            address(scales_ptr, EACH), address(out_ptr, EACH),
            each(num_experts, EACH), each(num_units, EACH), each(num_row_tiles, EACH), each(width, EACH),
            each(slab_rows, EACH),
            gl.full([THREADS], beta, gl.float32, EACH), gl.full([THREADS], linear_beta, gl.float32, EACH),
        ],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
