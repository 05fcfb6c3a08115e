# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The serial part of the KDA chunk form on Hopper, in Gluon: operands come by the copy engine into two buffers.

A program has a whole state [128, 128], so that operands are read once: 72 kB a chunk, asked for as soon as the chunk
before last is done. Two warp groups have half of its values each. Every left factor lies in shared memory as it was
copied; the state and U pass through it as right factors.
In and out as `triton_chunk.scan_kernel` and `fragment_kernel`, not direct, for 64 tokens and heads of 128 in BF16. The
interpreter does not know Gluon. Launched by `prefill`; needs triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

C: gl.constexpr = gl.constexpr(64)
K: gl.constexpr = gl.constexpr(128)
TILE: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SUMS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
OUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
BUFFERS: gl.constexpr = gl.constexpr(2)


@gluon.jit
def fetch(rows, tiles, ready, place, slot, wanted, BYTES: gl.constexpr):
    """Ask for a chunk's operands; their buffers are free."""
    bell, row = ready.index(slot), (place * C).to(gl.int32)
    mbarrier.expect(bell, BYTES, pred=wanted)
    for n in gl.static_range(len(rows)):
        tma.async_copy_global_to_shared(rows[n], [row, 0], bell, tiles[n].index(slot), pred=wanted)


@gluon.jit
def buffers():
    """For rows of 128."""
    return gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, C, K], TILE)


@gluon.jit
def bells():
    """A barrier a buffer, for one arrival."""
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for one in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(one), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return ready


@gluon.jit(do_not_specialize=["num_spans", "num_heads", "head_first"])
def column_scan_kernel(
    w_rows, u_rows, k_rows, q_rows, a_rows, gamma_ptr, chunks_ptr, segments_ptr, order_ptr, entering_ptr,
    out_ptr, after_ptr, num_spans, num_heads, head_first, IS_CUT: gl.constexpr, IS_EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (heads of the group, segments). *_rows: descriptors of [chunks * heads * 64, 128 or 64]. IS_EARLY: U is made
    while the queries' product is under way."""
    h, heads = gl.program_id(0), gl.num_programs(0)
    segment = gl.load(order_ptr + gl.program_id(1)).to(gl.int64)
    span, first = gl.load(segments_ptr + segment * 4).to(gl.int64), gl.load(segments_ptr + segment * 4 + 1)
    count, is_last = gl.load(segments_ptr + segment * 4 + 2), gl.load(segments_ptr + segment * 4 + 3)
    w, u, keys, queries = buffers(), buffers(), buffers(), buffers()
    pairs = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, C, C], TILE)
    rows, tiles, ready = (w_rows, u_rows, k_rows, q_rows, a_rows), (w, u, keys, queries, pairs), bells()
    for one in gl.static_range(BUFFERS):
        fetch(rows, tiles, ready, (first + one) * heads + h, one, one < count, 4 * C * K * 2 + C * C * 2)
    states = gl.allocate_shared_memory(gl.bfloat16, [K, K], TILE)
    fixed = gl.allocate_shared_memory(gl.bfloat16, [C, K], TILE)
    key = gl.arange(0, K, gl.SliceLayout(1, SUMS))
    tile = gl.arange(0, K, gl.SliceLayout(0, SUMS))[None, :] * K + key[:, None]
    if IS_CUT:
        state = gl.load(entering_ptr + (segment * heads + h) * (K * K) + tile)
    else:
        state = gl.load(entering_ptr + (span * num_heads + head_first + h) * (K * K) + tile)
    leaving = after_ptr + (head_first + h) * (K * K) + tile
    i, value = gl.arange(0, C, gl.SliceLayout(1, OUT))[:, None], gl.arange(0, K, gl.SliceLayout(0, OUT))[None, :]
    for step in range(count):
        slot, c = step % BUFFERS, (first + step).to(gl.int64)
        token, length = gl.load(chunks_ptr + c * 3).to(gl.int64), gl.load(chunks_ptr + c * 3 + 1)
        border = gl.load(chunks_ptr + c * 3 + 2).to(gl.int64)
        gamma = gl.load(gamma_ptr + (c * heads + h) * K + key)
        states.store(state.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(ready.index(slot), (step // BUFFERS) & 1)
        zeros = gl.zeros([C, K], gl.float32, SUMS)
        held = warpgroup_mma(w.index(slot), states, zeros, use_acc=False, is_async=True)
        o = warpgroup_mma(queries.index(slot), states, zeros, use_acc=False, is_async=True)
        if IS_EARLY:
            held = warpgroup_mma_wait(1, deps=[held])
        else:
            held, o = warpgroup_mma_wait(0, deps=[held, o])
        fixed.store((u.index(slot).load(SUMS).to(gl.float32) - held).to(gl.bfloat16))
        state *= gamma[:, None]
        fence_async_shared()
        gl.thread_barrier()
        state = warpgroup_mma(keys.index(slot).permute((1, 0)), fixed, state, is_async=True)
        o = warpgroup_mma(pairs.index(slot), fixed, o, is_async=True)
        state, o = warpgroup_mma_wait(0, deps=[state, o])
        gl.thread_barrier()  # every warp has read the buffers
        following = (first + step + BUFFERS) * heads + h
        fetch(rows, tiles, ready, following, slot, step + BUFFERS < count, 4 * C * K * 2 + C * C * 2)
        at = out_ptr + ((token + i) * num_heads + head_first + h) * K + value
        gl.store(at, gl.convert_layout(o.to(out_ptr.dtype.element_ty), OUT), mask=i < length)
        if border >= 0:
            gl.store(leaving + (num_spans + border) * num_heads * (K * K), state)
    if is_last != 0:
        gl.store(leaving + span * num_heads * (K * K), state)


@gluon.jit
def column_fragment_kernel(
    w_rows, u_rows, k_rows, gamma_ptr, segments_ptr, fragments_ptr, fragment_ptr,
):  # fmt: skip
    """Grid (2, heads of the group, fragments). fragment [segments, heads, 256, 128]: S~ of program 0, then M of 1."""
    is_matrix, h, heads = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    segment = gl.load(fragments_ptr + gl.program_id(2)).to(gl.int64)
    first, count = gl.load(segments_ptr + segment * 4 + 1), gl.load(segments_ptr + segment * 4 + 2)
    w, u, keys = buffers(), buffers(), buffers()
    rows, tiles, ready = (w_rows, u_rows, k_rows), (w, u, keys), bells()
    for one in gl.static_range(BUFFERS):
        fetch(rows, tiles, ready, (first + one) * heads + h, one, one < count, 3 * C * K * 2)
    states = gl.allocate_shared_memory(gl.bfloat16, [K, K], TILE)
    fixed = gl.allocate_shared_memory(gl.bfloat16, [C, K], TILE)
    key, value = gl.arange(0, K, gl.SliceLayout(1, SUMS)), gl.arange(0, K, gl.SliceLayout(0, SUMS))
    state = gl.where((key[:, None] == value[None, :]) & (is_matrix != 0), 1.0, 0.0)
    # values are not the identity's business
    share = gl.where(is_matrix != 0, 0.0, 1.0)
    for step in range(count):
        slot = step % BUFFERS
        gamma = gl.load(gamma_ptr + ((first + step).to(gl.int64) * heads + h) * K + key)
        states.store(state.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(ready.index(slot), (step // BUFFERS) & 1)
        held = gl.zeros([C, K], gl.float32, SUMS)
        held = warpgroup_mma(w.index(slot), states, held, use_acc=False, is_async=True)
        held = warpgroup_mma_wait(0, deps=[held])
        fixed.store((u.index(slot).load(SUMS).to(gl.float32) * share - held).to(gl.bfloat16))
        state *= gamma[:, None]
        fence_async_shared()
        gl.thread_barrier()
        state = warpgroup_mma(keys.index(slot).permute((1, 0)), fixed, state, is_async=True)
        state = warpgroup_mma_wait(0, deps=[state])
        gl.thread_barrier()  # every warp has read the buffers
        following = (first + step + BUFFERS) * heads + h
        fetch(rows, tiles, ready, following, slot, step + BUFFERS < count, 3 * C * K * 2)
    at = fragment_ptr + (segment * heads + h) * (2 * K * K) + is_matrix * (K * K)
    gl.store(at + (value[None, :] * K + key[:, None]), state)
