# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The preparation of the KDA chunk form for bounded gates (>= -5) on Hopper, in Gluon: layouts are chosen here.

`triton_bounded` moves every tile between the layout of loads, that of products' sums and shared memory: 61 barriers,
255 registers, two programs on a multiprocessor. Here a thread has two channels of half a chunk: sums of g over tokens
are additions of its own, and all that is decayed goes from there to shared memory or memory at once. From two
exponentials a value, those to and from the 16th token of the half, come the others by factors of a channel: the decays
from the half's start and to its end are at most 1, as are the factors that extend them to the chunk's.
In and out as `triton_bounded.bounded_kernel`, not direct, for 64 tokens and 128 channels in BF16, to which FP32 keys
and queries are rounded. The interpreter does not know Gluon. Launched by `prefill`; needs triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

C: gl.constexpr = gl.constexpr(64)
HALF: gl.constexpr = gl.constexpr(32)
K: gl.constexpr = gl.constexpr(128)
COLUMN: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [2, 1, 2], [2, 1, 0]))
ROW: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
GATES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
SQUARE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
NARROW: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
# a block of 16 x 16 each warp
SMALL: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
PLAIN: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
TILE: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def add(a, b):
    """Of a scan."""
    return a + b


@gluon.jit
def add_both(a, b, c, d):
    """Of a sum of pairs."""
    return a + c, b + d


@gluon.jit
def corners(i, j, SIZE: gl.constexpr):
    """Row in the second, column in the first half of the same 2 SIZE tokens."""
    return (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)


@gluon.jit
def small_product(a, b):
    """Of blocks [4, 16, 16], one a warp; FP16 factors."""
    left = gl.convert_layout(a.to(gl.float16), gl.DotOperandLayout(0, SMALL, 2))
    right = gl.convert_layout(b.to(gl.float16), gl.DotOperandLayout(1, SMALL, 2))
    return mma_v2(left, right, gl.zeros([4, 16, 16], gl.float32, SMALL))


@gluon.jit
def square_product(a, b, tile):
    """a b [64, 64], FP16 factors: a out of registers, b through `tile`."""
    tile.store(b.to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    left = gl.convert_layout(a.to(gl.float16), gl.DotOperandLayout(0, NARROW, 2))
    return warpgroup_mma(left, tile, gl.zeros([C, C], gl.float32, NARROW), use_acc=False)


@gluon.jit
def invert_blocks(lower):
    """(I + L)^-1 of the blocks of 16 on the diagonal of a strictly lower L [64, 64], one a warp, the rest zeros. By
    halving: of a block [[A, 0], [B, D]] of inverses A, D, B becomes -D B A."""
    i = gl.arange(0, C, gl.SliceLayout(1, NARROW))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, NARROW))[None, :]
    is_block = i // 16 == j // 16
    apart = gl.where(is_block, lower, 0.0).reshape([4, 16, 4, 16])
    apart_layout: gl.constexpr = apart.type.layout
    blocks = gl.convert_layout(gl.sum(apart, axis=2), SMALL)
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, SMALL)))[None, :, None]
    s = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, SMALL)))[None, None, :]
    small = gl.where(r == s, 1.0, 0.0) - gl.where(corners(r, s, 1), blocks, 0.0)
    for level in gl.static_range(1, 4):
        below = gl.where(corners(r, s, 1 << level), blocks, 0.0)
        small -= small_product(small, small_product(below, small))
    small = gl.convert_layout(small, gl.SliceLayout(2, apart_layout))
    spread = small[:, :, None, :] + gl.zeros([4, 16, 4, 16], gl.float32, apart_layout)
    return gl.where(is_block, gl.convert_layout(spread.reshape([C, C]), NARROW), 0.0)


@gluon.jit
def merge_inverse(inverse, lower, first, second, SIZE: gl.constexpr):
    """The same from blocks of SIZE to blocks of twice that; first, second: tiles for products."""
    i = gl.arange(0, C, gl.SliceLayout(1, NARROW))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, NARROW))[None, :]
    below = gl.where(corners(i, j, SIZE), lower, 0.0)
    return inverse - square_product(inverse, square_product(below, inverse, first), second)


@gluon.jit
def masked_pairs(within, across, HAS_SELF: gl.constexpr):
    """Pairs of a row and an earlier column, or itself, of two products [64, 64]: within and across halves."""
    i = gl.arange(0, C, gl.SliceLayout(1, NARROW))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, NARROW))[None, :]
    is_within = (i // HALF == j // HALF) & ((i >= j) if HAS_SELF else (i > j))
    return gl.where(is_within, within, gl.where((i >= HALF) & (j < HALF), across, 0.0))


@gluon.jit
def store_rows(at, tile, values, LAYOUT: gl.constexpr):
    """[64, n] to rows that follow each other, through a tile that no one else uses until the next barrier."""
    N: gl.constexpr = values.shape[1]
    tile.store(values.to(gl.bfloat16))
    gl.thread_barrier()
    i, n = gl.arange(0, C, gl.SliceLayout(1, LAYOUT)), gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    gl.store(at + (i[:, None] * N + n[None, :]), tile.load(LAYOUT))


@gluon.jit
def fetch(tile, start, row, length, LAYOUT: gl.constexpr):
    """Rows of a chunk, zeros behind the last one, as a group of their own. Those that are wider than the tile's pass
    through registers."""
    i, n = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :]
    if start.dtype.element_ty == tile.dtype:
        async_copy.async_copy_global_to_shared(tile, start + (i * row + n), mask=(i < length) & (n < K))
        async_copy.commit_group()
    else:
        tile.store(gl.load(start + (i * row + n), mask=(i < length) & (n < K), other=0.0).to(tile.dtype))


@gluon.jit
def part(tile, PART: gl.constexpr):
    """Half the tokens of both halves [2, 16, 128] of a tile [64, 128]."""
    return tile.reshape([2, HALF, K]).slice(PART * 16, 16, dim=1).load(COLUMN)


@gluon.jit
def keep(tile, values, PART: gl.constexpr):
    """Half the tokens of both halves [2, 16, 128] into a tile [64, 128]."""
    tile.reshape([2, HALF, K]).slice(PART * 16, 16, dim=1).store(values.to(gl.bfloat16))


@gluon.jit
def columns(g, k, kc, kx, k_out, token, channel, cross, rest, tail, PART: gl.constexpr):
    """Keys decayed from each token to the 16th one of its half, to that of the second half, and to the chunk's end. The
    last two by way of the half's end: a factor from 16th to 16th token would be 0 in FP32 behind 87 of 160."""
    k = k.to(gl.float32) * gl.exp2(g * -LOG2E)
    keep(kc, k, PART)
    k *= rest[:, None, :]
    keep(kx, k * cross[:, None, :], PART)
    gl.store(k_out + (token * K + channel), (k * tail[:, None, :]).to(gl.bfloat16))


@gluon.jit
def rows(g, k, q, kr, qr, q_in, token, channel, into, lead, scale, PART: gl.constexpr):
    """Keys and queries decayed from the 16th token of the half to each; queries also from the chunk's start."""
    decay = gl.exp2(g * LOG2E)
    keep(kr, k.to(gl.float32) * decay, PART)
    q = q.to(gl.float32) * scale * decay
    keep(qr, q, PART)
    gl.store(q_in + (token * K + channel), (q * into[:, None, :] * lead[:, None, :]).to(gl.bfloat16))


@gluon.jit(do_not_specialize=["beta_row", "head_first"])
def column_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, table_ptr, chunks_ptr, w_ptr, u_ptr, k_out_ptr, q_in_ptr, a_ptr, gamma_ptr,
    q_row, k_row, v_row, g_row, beta_row, head_first, scale, HEADS_FIRST: gl.constexpr,
):  # fmt: skip
    """Arguments as `bounded_kernel`, of which the table is not read. Grid (heads of the group, chunks) if HEADS_FIRST,
    so that programs side by side read and write whole rows; else (chunks, heads)."""
    if HEADS_FIRST:
        c, h, heads = gl.program_id(1).to(gl.int64), gl.program_id(0), gl.num_programs(0)
    else:
        c, h, heads = gl.program_id(0).to(gl.int64), gl.program_id(1), gl.num_programs(1)
    head, place = h + head_first, c * heads + h
    first, length = gl.load(chunks_ptr + c * 3).to(gl.int64), gl.load(chunks_ptr + c * 3 + 1)
    q_ptr, k_ptr = q_ptr + first * q_row + head * K, k_ptr + first * k_row + head * K
    v_ptr, g_ptr = v_ptr + first * v_row + head * K, g_ptr + first * g_row + head * K
    beta_ptr += first * beta_row + head
    g_tile = gl.allocate_shared_memory(gl.float32, [C, K], PLAIN)
    k_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], TILE)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], TILE)
    fetch(g_tile, g_ptr, g_row, length, GATES)
    fetch(k_tile, k_ptr, k_row, length, ROW)
    fetch(q_tile, q_ptr, q_row, length, ROW)
    i, j = gl.arange(0, C, gl.SliceLayout(1, NARROW)), gl.arange(0, C, gl.SliceLayout(0, NARROW))
    beta = gl.load(beta_ptr + i * beta_row, mask=i < length, other=0.0)
    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, COLUMN)))[:, None, None]
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, COLUMN)))[None, :, None]
    channel = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, COLUMN)))[None, None, :]
    # first and second 16 tokens of each half
    early, late = half * HALF + row, half * HALF + row + 16
    async_copy.wait_group(2 if k_ptr.dtype.element_ty == gl.bfloat16 else 0)
    gl.thread_barrier()
    g_early, g_late = part(g_tile, 0), part(g_tile, 1)
    g_early, g_late = gl.associative_scan(g_early, 1, add), gl.associative_scan(g_late, 1, add)
    vector: gl.constexpr = gl.SliceLayout(1, COLUMN)
    # [2, 128]: of all 16 tokens
    before, after = gl.sum(gl.where(row == 15, g_early, 0.0), axis=1), gl.sum(gl.where(row == 15, g_late, 0.0), axis=1)
    is_first = gl.arange(0, 2, gl.SliceLayout(1, vector))[:, None] == 0
    g_early -= before[:, None, :]
    before, after = before * LOG2E, after * LOG2E
    chunk, second = gl.reduce((before + after, gl.where(is_first, 0.0, before)), 0, add_both)
    gl.store(gamma_ptr + place * K + gl.arange(0, K, gl.SliceLayout(0, vector)), gl.exp2(chunk))
    other = gl.exp2(chunk[None, :] - (before + after))
    lead, tail = gl.where(is_first, 1.0, other), gl.where(is_first, other, 1.0)
    cross = gl.where(is_first, gl.exp2(second)[None, :], 0.0)
    into, rest = gl.exp2(before), gl.exp2(after)
    factors = gl.allocate_shared_memory(gl.float32, [2, K], PLAIN, into)
    rests = gl.allocate_shared_memory(gl.float32, [2, K], PLAIN, rest)
    async_copy.wait_group(0)
    gl.thread_barrier()
    kc = gl.allocate_shared_memory(gl.bfloat16, [C, K], TILE)
    kx = gl.allocate_shared_memory(gl.bfloat16, [C, K], TILE)
    k_out, q_in = k_out_ptr + place * (C * K), q_in_ptr + place * (C * K)
    k = part(k_tile, 0)
    columns(g_early, k, kc, kx, k_out, early, channel, cross, rest, tail, 0)
    rows(g_early, k, part(q_tile, 0), k_tile, q_tile, q_in, early, channel, into, lead, scale, 0)
    k = part(k_tile, 1)
    columns(g_late, k, kc, kx, k_out, late, channel, cross, rest, tail, 1)
    rows(g_late, k, part(q_tile, 1), k_tile, q_tile, q_in, late, channel, into, lead, scale, 1)
    fence_async_shared()
    gl.thread_barrier()

    zeros = gl.zeros([C, C], gl.float32, NARROW)
    within = warpgroup_mma(k_tile, kc.permute((1, 0)), zeros, use_acc=False, is_async=True)
    across = warpgroup_mma(k_tile, kx.permute((1, 0)), zeros, use_acc=False, is_async=True)
    within, across = warpgroup_mma_wait(0, deps=[within, across])
    lower = masked_pairs(within, across, False) * beta[:, None]
    within = warpgroup_mma(q_tile, kc.permute((1, 0)), zeros, use_acc=False, is_async=True)
    across = warpgroup_mma(q_tile, kx.permute((1, 0)), zeros, use_acc=False, is_async=True)
    inverse = invert_blocks(lower)  # meanwhile
    within, across = warpgroup_mma_wait(0, deps=[within, across])
    gl.thread_barrier()  # every warp has read the tiles, others take their place
    square = gl.allocate_shared_memory(gl.bfloat16, [C, C], TILE)
    store_rows(a_ptr + place * (C * C), square, masked_pairs(within, across, True), SQUARE)

    values = gl.allocate_shared_memory(gl.bfloat16, [C, K], TILE)
    fetch(values, v_ptr, v_row, length, ROW)
    one = gl.allocate_shared_memory(gl.float16, [C, C], TILE)
    two = gl.allocate_shared_memory(gl.float16, [C, C], TILE)
    beta = gl.load(beta_ptr + j * beta_row, mask=j < length, other=0.0)
    inverse = merge_inverse(merge_inverse(inverse, lower, one, two, 16), lower, one, two, 32)
    solved = (inverse * beta[None, :]).to(gl.bfloat16)
    solved = gl.convert_layout(solved, gl.DotOperandLayout(0, WIDE, 2))
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    zeros = gl.zeros([C, K], gl.float32, WIDE)
    u = warpgroup_mma(solved, values, zeros, use_acc=False, is_async=True)
    u = warpgroup_mma_wait(0, deps=[u])
    store_rows(u_ptr + place * (C * K), q_tile, u, ROW)
    # keys as they were decayed for pairs: the second half's first, taken from its 16th token to that of the first half
    j = gl.arange(0, C, gl.SliceLayout(0, gl.DotOperandLayout(0, WIDE, 2)))[None, :]
    none = gl.zeros_like(solved)
    w = warpgroup_mma(gl.where(j < HALF, none, solved), k_tile, zeros, use_acc=False, is_async=True)
    w = warpgroup_mma_wait(0, deps=[w]) * factors.slice(1, 1, dim=0).load(WIDE)
    w = warpgroup_mma(gl.where(j < HALF, solved, none), k_tile, w * rests.slice(0, 1, dim=0).load(WIDE), is_async=True)
    w = warpgroup_mma_wait(0, deps=[w]) * factors.slice(0, 1, dim=0).load(WIDE)
    gl.thread_barrier()
    store_rows(w_ptr + place * (C * K), q_tile, w, ROW)
