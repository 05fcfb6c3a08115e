# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""The kernel around the PTX of `slab_text`: its arguments, its shared memory. Launched by `slabs`; needs triton."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def slab_kernel(
    x_ptr, table_ptr, order_ptr, packed_ptr, scales_ptr, out_ptr,
    num_experts, num_units, num_row_tiles, width, slab_rows, beta, linear_beta,
    TEXT: gl.constexpr, OPERANDS: gl.constexpr, PIECES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """out: slabs of hidden, or rows [., width]; grid (blocks of 32 WARPS weight rows, tiles). x: slabs of inputs. PIECES of
    4096 bytes of shared memory, whose beginning the text finds by its name: nothing else of the kernel may need any."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.int32, [PIECES + 1, 1024], WORDS)
    memory.index(PIECES).store(gl.zeros([1024], gl.int32, gl.BlockedLayout([4], [32], [WARPS], [0])))
    gl.inline_asm_elementwise(
        TEXT, OPERANDS,
        [
            gl.full([32 * WARPS], x_ptr.to(gl.int64), gl.int64, EACH), gl.full([32 * WARPS], table_ptr.to(gl.int64), gl.int64, EACH),
            gl.full([32 * WARPS], order_ptr.to(gl.int64), gl.int64, EACH),
            gl.full([32 * WARPS], packed_ptr.to(gl.int64), gl.int64, EACH),
            gl.full([32 * WARPS], scales_ptr.to(gl.int64), gl.int64, EACH),
            gl.full([32 * WARPS], out_ptr.to(gl.int64), gl.int64, EACH),
            gl.full([32 * WARPS], num_experts, gl.int32, EACH), gl.full([32 * WARPS], num_units, gl.int32, EACH),
            gl.full([32 * WARPS], num_row_tiles, gl.int32, EACH), gl.full([32 * WARPS], width, gl.int32, EACH),
            gl.full([32 * WARPS], slab_rows, gl.int32, EACH),
            gl.full([32 * WARPS], beta, gl.float32, EACH), gl.full([32 * WARPS], linear_beta, gl.float32, EACH),
        ],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
