# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""The fold of a draft window in Gluon, as `triton_fold`, for heads of 128: a program has ROWS rows of a head's state.

All that it reads is asked for at its start: the tile and inputs of the convolution into registers, records of all
tokens into shared memory. In Triton a token's vectors are asked for at the end of the token before (the compiler moves
the loads there), so that each token waits for memory: 46 us of 166 for eight tokens of 8 layers x 32 x 12 heads.
Products, sums and the layout of a tile are those of `triton_token.advance`, so states are equal to the decode kernel's
in every bit.
The interpreter does not know Gluon. Launched by `fused`; needs triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

K: gl.constexpr = gl.constexpr(128)
PART: gl.constexpr = gl.constexpr(32)
NP: gl.constexpr = gl.constexpr(4)
# tokens a window may have
MOST: gl.constexpr = gl.constexpr(8)
FLAT: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def ask_records(
    line, chunk, count, pointers, kept, heads,
    ROWS: gl.constexpr, WIDE: gl.constexpr, THIN: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    """Begin to copy what is recorded of `count` tokens, the first of them at `line`, into `kept`."""
    k_ptr, decay_ptr, v_ptr, beta_ptr = pointers
    keys, decays, values, betas = kept
    token = gl.arange(0, MOST, gl.SliceLayout(1, WIDE))[:, None]
    key = gl.arange(0, K, gl.SliceLayout(0, WIDE))[None, :]
    places = (line + token * heads) * K + key
    async_copy.async_copy_global_to_shared(keys.index(0), k_ptr + places, mask=(token < count) & (key >= 0))
    async_copy.async_copy_global_to_shared(decays.index(0), decay_ptr + places, mask=(token < count) & (key >= 0))
    token, row = gl.arange(0, MOST, gl.SliceLayout(1, THIN))[:, None], gl.arange(0, ROWS, gl.SliceLayout(0, THIN))
    places = (line + token * heads) * K + (chunk * ROWS + row[None, :])
    async_copy.async_copy_global_to_shared(values.index(0), v_ptr + places, mask=(token < count) & (row >= 0)[None, :])
    token = gl.arange(0, MOST, ONE)
    async_copy.async_copy_global_to_shared(betas.index(0), beta_ptr + (line + token * heads), mask=token < count)


@gluon.jit
def load_parts(tiles, first, layout: gl.constexpr):
    """NP neighbouring tiles or vectors, a tuple."""
    parts = ()
    for p in gl.static_range(NP):
        parts += (tiles.index(first + p).load(layout),)
    return parts


@gluon.jit
def dot_keys(tile, vector):
    """Sum over K of a tile times a vector."""
    total = tile[0] * vector[0][None, :]
    for p in gl.static_range(1, NP):
        total = gl.fma(tile[p], vector[p][None, :], total)
    return gl.sum(total, axis=1)


@gluon.jit
def advance(state, k, v, decay, beta):
    """`triton_token.advance`: a tile -> the new one."""
    decayed = ()
    for p in gl.static_range(NP):
        decayed += (state[p] * decay[p][None, :],)
    u = beta * (v - dot_keys(decayed, k))
    new = ()
    for p in gl.static_range(NP):
        new += (gl.fma(u[:, None], k[p][None, :], decayed[p]),)
    return new


@gluon.jit
def load_kept(x, history, h, count, heads, history_row, is_wanted, TAPS: gl.constexpr, LAYOUT: gl.constexpr):
    """A head's last TAPS - 1 inputs of q, k and v after `count` more, x [count, 3 H K]: tiles [4, K], and where they
    go in a row of the history."""
    kind, place = gl.arange(0, 4, gl.SliceLayout(1, LAYOUT))[:, None], gl.arange(0, K, gl.SliceLayout(0, LAYOUT))
    live = (kind < 3) & (place >= 0)[None, :] & is_wanted
    channel = (kind * heads + h) * K + place[None, :]
    kept = ()
    for j in gl.static_range(TAPS - 1):
        is_old = j + count < TAPS - 1
        old = gl.load(history + (j + count) * history_row + channel, mask=live & is_old, other=0.0)
        token = gl.where(is_old, 0, j + count - (TAPS - 1))
        new = gl.load(x + token * (heads * 3 * K) + channel, mask=live & (is_old == 0), other=0.0)
        kept += (gl.where(is_old, old, new.to(history.dtype.element_ty)),)
    return kept, channel, live


@gluon.jit(do_not_specialize=["num_requests", "window", "heads"])
def direct_fold_kernel(
    x_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, history_ptr, state_ptr, slots_ptr, accepted_ptr,
    num_requests, window, heads, history_layer, history_slot, history_row, state_layer, state_slot,
    ROWS: gl.constexpr, WARPS: gl.constexpr, TAPS: gl.constexpr,
):  # fmt: skip
    """Grid (heads x K / ROWS, N, L). Arguments as `triton_fold.fold_kernel`; heads of 128, a window of up to 8."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    THIN: gl.constexpr = gl.BlockedLayout([1, 4], [128 // ROWS, ROWS // 4], [WARPS, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    kind: gl.constexpr = v_ptr.dtype.element_ty
    chunk, h = gl.program_id(0) % (K // ROWS), gl.program_id(0) // (K // ROWS)
    n, layer = gl.program_id(1), gl.program_id(2).to(gl.int64)
    slot, count = gl.load(slots_ptr + n).to(gl.int64), gl.load(accepted_ptr + n).to(gl.int32)
    if (slot == 0) | (count == 0):
        return
    keys = gl.allocate_shared_memory(gl.float32, [1, MOST, K], FLAT)
    decays = gl.allocate_shared_memory(gl.float32, [1, MOST, K], FLAT)
    values = gl.allocate_shared_memory(kind, [1, MOST, ROWS], FLAT)
    betas = gl.allocate_shared_memory(gl.float32, [1, MOST], LINE)
    key_lines = keys._reinterpret(gl.float32, [MOST * NP, PART], LINE)
    decay_lines = decays._reinterpret(gl.float32, [MOST * NP, PART], LINE)
    value_lines = values._reinterpret(kind, [MOST, ROWS], LINE)
    beta_lines = betas._reinterpret(gl.float32, [MOST, 1], LINE)
    line, pointers = (layer * num_requests + n) * window * heads + h, (k_ptr, decay_ptr, v_ptr, beta_ptr)
    ask_records(line, chunk, count, pointers, (keys, decays, values, betas), heads, ROWS, WIDE, THIN, ONE)
    async_copy.commit_group()
    row, key = gl.arange(0, ROWS, gl.SliceLayout(1, TILE)), gl.arange(0, PART, gl.SliceLayout(0, TILE))
    start = state_ptr + (layer * state_layer + slot * state_slot + (h * K + chunk * ROWS) * K)
    places = start + (row[:, None] * K + key[None, :])
    tile = ()
    for p in gl.static_range(NP):
        tile += (gl.load(places + p * PART),)
    history = history_ptr + layer * history_layer + slot * history_slot
    inputs = x_ptr + (layer * num_requests + n) * window * (heads * 3 * K)
    past, channel, live = load_kept(inputs, history, h, count, heads, history_row, chunk == 0, TAPS, WIDE)
    gl.thread_barrier()  # else the compiler asks for the state after the wait
    async_copy.wait_group(0)
    gl.thread_barrier()  # what every warp copied is there
    for t in range(count):
        k = load_parts(key_lines, t * NP, gl.SliceLayout(0, TILE))
        decay = load_parts(decay_lines, t * NP, gl.SliceLayout(0, TILE))
        v = value_lines.index(t).load(gl.SliceLayout(1, TILE)).to(gl.float32)
        tile = advance(tile, k, v, decay, beta_lines.index(t).load(gl.SliceLayout(1, TILE)))
    for p in gl.static_range(NP):
        gl.store(places + p * PART, tile[p])
    gl.thread_barrier()  # inputs may have been read by two warps, and the later must not find what the other wrote
    for j in gl.static_range(TAPS - 1):
        gl.store(history + j * history_row + channel, past[j], mask=live)
