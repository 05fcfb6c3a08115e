"""One split of absorbed attention for Hopper, in Gluon: tiles come by the bulk copy engine into two buffers.

Triton's pipeliner wants three buffers where a warp group multiplies from shared memory, and three tiles of 64 keys are
more than a program may have. Two are enough if the next but one is asked for as soon as its buffer has been used: one
tile of 72 kB is always under way. Copies by the engine cost no instructions and no registers.
A third (beside one of the other 64 values, for 16 query rows) was slower. Page numbers are loaded a tile ahead, before
the wait for its keys. With 64 query rows results are stored as the matrix unit leaves them: to turn them first takes
registers that there are not, and 3 us of 113. To ask for the first tiles before the kernel in front has ended gains
where that is another attention, and loses in a step.
In and out: as `triton_decode.split_kernel` for pages of 64 keys and 512 + 64 values a row in BF16.
Importing this needs triton; the interpreter does not know Gluon. Source: spec/kernels.md C.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

KEYS: gl.constexpr = gl.constexpr(64)
R: gl.constexpr = gl.constexpr(512)
D: gl.constexpr = gl.constexpr(64)


@gluon.jit
def row_of(pages, tile, page_rows, wanted):
    """The row of the arena where a tile begins."""
    return (gl.load(pages + tile, mask=wanted, other=0) * page_rows).to(gl.int32)


@gluon.jit
def fetch(latent_rows, shared_rows, latents, shareds, ready, row, slot, wanted):
    """Ask for a tile; its buffer is free."""
    bell = ready.index(slot)
    mbarrier.expect(bell, KEYS * (R + D) * 2, pred=wanted)
    tma.async_copy_global_to_shared(latent_rows, [row, 0], bell, latents.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(shared_rows, [row, R], bell, shareds.index(slot), pred=wanted)


@gluon.jit
def blank(latent, keys_left, num_warps: gl.constexpr):
    """Zeros for what lies behind the last key: a share of 0 times a NaN would not be 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    key = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    for part in gl.static_range(R // 64):
        some = latent.slice(part * 64, 64, dim=1)
        values = some.load(layout)
        some.store(gl.where((key < keys_left)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def load_queries(at, row, q_row, num_rows, FIRST: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Values FIRST .. FIRST + WIDTH of the query rows, zeros behind the last."""
    value = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    return gl.load((at + row * q_row)[:, None] + value[None, :], mask=(row < num_rows)[:, None], other=0)


@gluon.jit
def store_result(result, out, first_row, block, num_rows, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """result [R, ROWS]."""
    row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    channel = gl.arange(0, R, gl.SliceLayout(1, LAYOUT))
    at = out + (first_row + row)[None, :] * R + channel[:, None]
    gl.store(at, result, mask=(row < num_rows)[None, :])


@gluon.jit(do_not_specialize=["heads", "num_rows", "window", "splits", "most"])
def bulk_split_kernel(
    q, latent_rows, shared_rows, table, lengths, out, lse, scale2,
    q_request, q_row, page_rows, table_request,
    heads, num_rows, window, splits, most,
    ROWS: gl.constexpr, BUFFERS: gl.constexpr, WRITES_EMPTY: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Program (request, split, block of ROWS rows); q, out, lse as in `split_kernel`. page_rows: from page to page.

    most: tiles a request can have by its row of the table; if it has them all, its first pages are asked for together
    with its length.
    The 64 keys of a tile are the rows of one warp group; a second one takes half the query rows in the first product,
    half the channels in the second.
    """
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, num_warps // 4], [16, ROWS * 4 // num_warps, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    by_row: gl.constexpr = gl.SliceLayout(0, scores)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    latents = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, KEYS, R], swizzled)
    shareds = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, KEYS, D], swizzled)
    ready = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for one in gl.static_range(BUFFERS):
        mbarrier.init(ready.index(one), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request, split, block = gl.program_id(0).to(gl.int64), gl.program_id(1), gl.program_id(2)
    length = gl.load(lengths + request).to(gl.int32)
    pages = table + request * table_request
    likely, guesses = split * ((most + splits - 1) // splits), ()
    for one in gl.static_range(BUFFERS):
        guesses += (gl.load(pages + likely + one, mask=likely + one < most, other=0),)
    num_tiles = (length + KEYS - 1) // KEYS
    per_split = (num_tiles + splits - 1) // splits
    first = split * per_split
    count = gl.maximum(gl.minimum(num_tiles - first, per_split), 0)

    starts = ()
    for one in gl.static_range(BUFFERS):
        other = row_of(pages, first + one, page_rows, (one < count) & (first != likely))
        starts += (gl.where(first == likely, (guesses[one] * page_rows).to(gl.int32), other),)
    for one in gl.static_range(BUFFERS):
        fetch(latent_rows, shared_rows, latents, shareds, ready, starts[one], one, one < count)

    at = q + request * q_request
    row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    values = load_queries(at, row, q_row, num_rows, 0, R, wide)
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [ROWS, R], swizzled, values)
    row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, narrow))
    values = load_queries(at, row, q_row, num_rows, R, D, narrow)
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], swizzled, values)
    grouped: gl.constexpr = gl.NVMMASharedLayout(min(128, ROWS * 2), 16, 2)
    shares = gl.allocate_shared_memory(gl.bfloat16, [KEYS, ROWS], grouped)
    fence_async_shared()

    row = block * ROWS + gl.arange(0, ROWS, by_row)
    sees = length - (window - 1 - row // heads)
    n = gl.arange(0, KEYS, gl.SliceLayout(1, scores))
    best = gl.full([ROWS], float("-inf"), gl.float32, by_row)
    total = gl.zeros([KEYS, ROWS], gl.float32, scores)
    acc = gl.zeros([R, ROWS], gl.float32, sums)
    for i in range(count):
        slot = i % BUFFERS
        latent, shared = latents.index(slot), shareds.index(slot)
        later = row_of(pages, first + i + BUFFERS, page_rows, i + BUFFERS < count)
        mbarrier.wait(ready.index(slot), (i // BUFFERS) & 1)
        keys_left = length - (first + i) * KEYS
        if keys_left < KEYS:
            blank(latent, keys_left, num_warps)
            fence_async_shared()
            gl.thread_barrier()
        score = gl.zeros([KEYS, ROWS], gl.float32, scores)
        score = warpgroup_mma(latent, q_latent.permute((1, 0)), score, is_async=True)
        score = warpgroup_mma(shared, q_shared.permute((1, 0)), score, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        key = (first + i) * KEYS + n
        is_seen = (key < length)[:, None] & (key[:, None] < sees[None, :])
        score = gl.where(is_seen, score * scale2, float("-inf"))
        higher = gl.maximum(best, gl.max(score, axis=0))
        base = gl.where(higher == float("-inf"), 0.0, higher)
        share = gl.exp2(score - base[None, :])
        keep = gl.exp2(best - base)
        total = total * keep[None, :] + share
        shares.store(share.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        acc = acc * gl.convert_layout(keep, gl.SliceLayout(0, sums))[None, :]
        acc = warpgroup_mma(latent.permute((1, 0)), shares, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        best = higher
        gl.thread_barrier()  # every warp has read the buffer
        fetch(latent_rows, shared_rows, latents, shareds, ready, later, slot, i + BUFFERS < count)

    mass = gl.sum(total, axis=0)
    is_empty = mass == 0
    mass = gl.where(is_empty, 1.0, mass)
    first_row = (request * splits + split) * num_rows
    lse_row = gl.where(is_empty, float("-inf"), (best + gl.log2(mass)) * 0.6931471805599453)
    gl.store(lse + first_row + row, lse_row, row < num_rows)
    if WRITES_EMPTY or count > 0:
        result = acc / gl.convert_layout(mass, gl.SliceLayout(0, sums))[None, :]
        tall: gl.constexpr = sums if ROWS > 16 else gl.BlockedLayout([4, 1], [32, 1], [num_warps, 1], [0, 1])
        store_result(gl.convert_layout(result, tall), out, first_row, block, num_rows, ROWS, tall)
