# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""The fold of a draft window in Gluon, as `triton_fold`, for heads of 128: a tile is ROWS rows of a head's state.

`copied_fold_kernel`: as many programs as run at a time go through all tiles; states and records of the next tiles are
copied into BUFFERS in shared memory while one is computed. `direct_fold_kernel`: all that a program reads is asked for
at its start: a tile of the state and inputs of the convolution into registers, records of all tokens and other tiles
into shared memory. In Triton a token's vectors are asked for at the end of the token before (the compiler
moves the loads there), so that each token waits for memory: 46 us of 166 for eight tokens.
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
def place_of(item, heads, num_requests, CHUNKS: gl.constexpr):
    """A tile's place among a head's, head, request and layer."""
    line = item // CHUNKS
    return item % CHUNKS, line % heads, line // heads % num_requests, (line // (heads * num_requests)).to(gl.int64)


@gluon.jit
def ask_records(
    at, line, chunk, count, pointers, kept, heads,
    ROWS: gl.constexpr, WIDE: gl.constexpr, THIN: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    """Begin to copy what is recorded of `count` tokens, the first of them at `line`, into the buffers at `at`."""
    _, k_ptr, decay_ptr, v_ptr, beta_ptr, _, _ = pointers
    keys, decays, values, betas = kept
    token = gl.arange(0, MOST, gl.SliceLayout(1, WIDE))[:, None]
    key = gl.arange(0, K, gl.SliceLayout(0, WIDE))[None, :]
    places = (line + token * heads) * K + key
    async_copy.async_copy_global_to_shared(keys.index(at), k_ptr + places, mask=(token < count) & (key >= 0))
    async_copy.async_copy_global_to_shared(decays.index(at), decay_ptr + places, mask=(token < count) & (key >= 0))
    token, row = gl.arange(0, MOST, gl.SliceLayout(1, THIN))[:, None], gl.arange(0, ROWS, gl.SliceLayout(0, THIN))
    places = (line + token * heads) * K + (chunk * ROWS + row[None, :])
    async_copy.async_copy_global_to_shared(values.index(at), v_ptr + places, mask=(token < count) & (row >= 0)[None, :])
    token = gl.arange(0, MOST, ONE)
    async_copy.async_copy_global_to_shared(betas.index(at), beta_ptr + (line + token * heads), mask=token < count)


@gluon.jit
def ask(
    item, total, at, pointers, tiles, kept, num_requests, window, heads, state_layer, state_slot,
    ROWS: gl.constexpr, TILE: gl.constexpr, WIDE: gl.constexpr, THIN: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    """Begin to copy a tile and what is recorded for it into the buffers at `at`, which are free."""
    state_ptr, _, _, _, _, slots_ptr, accepted_ptr = pointers
    chunk, h, n, layer = place_of(item, heads, num_requests, K // ROWS)
    slot = gl.load(slots_ptr + n, mask=item < total, other=0).to(gl.int64)
    count = gl.load(accepted_ptr + n, mask=item < total, other=0).to(gl.int32)
    count = gl.where(slot != 0, count, 0)
    row, key = gl.arange(0, ROWS, gl.SliceLayout(1, TILE)), gl.arange(0, PART, gl.SliceLayout(0, TILE))
    start = state_ptr + (layer * state_layer + slot * state_slot + (h * K + chunk * ROWS) * K)
    for p in gl.static_range(NP):
        places = start + (row[:, None] * K + (key[None, :] + p * PART))
        async_copy.async_copy_global_to_shared(tiles.index(at * NP + p), places, mask=(row[:, None] >= 0) & (count > 0))
    line = (layer * num_requests + n) * window * heads + h
    ask_records(at, line, chunk, count, pointers, kept, heads, ROWS, WIDE, THIN, ONE)
    async_copy.commit_group()


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


@gluon.jit(do_not_specialize=["num_requests", "num_layers", "window", "heads"])
def copied_fold_kernel(
    x_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, history_ptr, state_ptr, slots_ptr, accepted_ptr,
    num_requests, num_layers, window, heads, history_layer, history_slot, history_row, state_layer, state_slot,
    ROWS: gl.constexpr, WARPS: gl.constexpr, BUFFERS: gl.constexpr, TAPS: gl.constexpr,
):  # fmt: skip
    """Grid (programs that run at a time). Arguments as `triton_fold.fold_kernel`; heads of 128, a window of up to 8."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    THIN: gl.constexpr = gl.BlockedLayout([1, 4], [128 // ROWS, ROWS // 4], [WARPS, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    kind: gl.constexpr = v_ptr.dtype.element_ty
    tiles = gl.allocate_shared_memory(gl.float32, [BUFFERS * NP, ROWS, PART], FLAT)
    keys = gl.allocate_shared_memory(gl.float32, [BUFFERS, MOST, K], FLAT)
    decays = gl.allocate_shared_memory(gl.float32, [BUFFERS, MOST, K], FLAT)
    values = gl.allocate_shared_memory(kind, [BUFFERS, MOST, ROWS], FLAT)
    betas = gl.allocate_shared_memory(gl.float32, [BUFFERS, MOST], LINE)
    key_lines = keys._reinterpret(gl.float32, [BUFFERS * MOST * NP, PART], LINE)
    decay_lines = decays._reinterpret(gl.float32, [BUFFERS * MOST * NP, PART], LINE)
    value_lines = values._reinterpret(kind, [BUFFERS * MOST, ROWS], LINE)
    beta_lines = betas._reinterpret(gl.float32, [BUFFERS * MOST, 1], LINE)
    pointers = (state_ptr, k_ptr, decay_ptr, v_ptr, beta_ptr, slots_ptr, accepted_ptr)
    kept = (keys, decays, values, betas)
    first, programs = gl.program_id(0), gl.num_programs(0)
    total = heads * (K // ROWS) * num_requests * num_layers
    for one in gl.static_range(BUFFERS - 1):
        ask(
            first + one * programs, total, one, pointers, tiles, kept, num_requests, window, heads, state_layer,
            state_slot, ROWS, TILE, WIDE, THIN, ONE,
        )  # fmt: skip
    row, key = gl.arange(0, ROWS, gl.SliceLayout(1, TILE)), gl.arange(0, PART, gl.SliceLayout(0, TILE))
    for item in range(first, total, programs):
        step = (item - first) // programs
        at = step % BUFFERS
        chunk, h, n, layer = place_of(item, heads, num_requests, K // ROWS)
        slot, count = gl.load(slots_ptr + n).to(gl.int64), gl.load(accepted_ptr + n).to(gl.int32)
        count = gl.where(slot != 0, count, 0)
        history = history_ptr + layer * history_layer + slot * history_slot
        inputs = x_ptr + (layer * num_requests + n) * window * (heads * 3 * K)
        past, channel, live = load_kept(
            inputs, history, h, count, heads, history_row, (chunk == 0) & (count > 0), TAPS, WIDE
        )
        async_copy.wait_group(BUFFERS - 2)
        gl.thread_barrier()  # what every warp copied is there, and every warp is done with the buffer before
        ask(
            item + (BUFFERS - 1) * programs, total, (step + BUFFERS - 1) % BUFFERS, pointers, tiles, kept,
            num_requests, window, heads, state_layer, state_slot, ROWS, TILE, WIDE, THIN, ONE,
        )  # fmt: skip
        tile = load_parts(tiles, at * NP, TILE)
        for t in range(count):
            line = at * MOST + t
            k = load_parts(key_lines, line * NP, gl.SliceLayout(0, TILE))
            decay = load_parts(decay_lines, line * NP, gl.SliceLayout(0, TILE))
            v = value_lines.index(line).load(gl.SliceLayout(1, TILE)).to(gl.float32)
            tile = advance(tile, k, v, decay, beta_lines.index(line).load(gl.SliceLayout(1, TILE)))
        start = state_ptr + (layer * state_layer + slot * state_slot + (h * K + chunk * ROWS) * K)
        for p in gl.static_range(NP):
            places = start + (row[:, None] * K + (key[None, :] + p * PART))
            gl.store(places, tile[p], mask=(row[:, None] >= 0) & (count > 0))
        gl.thread_barrier()  # inputs may have been read by two warps, and the later must not find what the other wrote
        for j in gl.static_range(TAPS - 1):
            gl.store(history + j * history_row + channel, past[j], mask=live)


@gluon.jit
def ask_tile(at, start, tiles, ROWS: gl.constexpr, TILE: gl.constexpr):
    """Begin to copy a tile of a state into the buffer at `at`, which is free."""
    row, key = gl.arange(0, ROWS, gl.SliceLayout(1, TILE)), gl.arange(0, PART, gl.SliceLayout(0, TILE))
    for p in gl.static_range(NP):
        places = start + (row[:, None] * K + (key[None, :] + p * PART))
        async_copy.async_copy_global_to_shared(tiles.index(at * NP + p), places, mask=(row[:, None] >= 0))
    async_copy.commit_group()


@gluon.jit
def advance_all(tile, count, first, lines, ROWS: gl.constexpr, TILE: gl.constexpr):
    """A tile after `count` tokens; first: its place among the program's tiles."""
    key_lines, decay_lines, values, beta_lines = lines
    for t in range(count):
        k = load_parts(key_lines, t * NP, gl.SliceLayout(0, TILE))
        decay = load_parts(decay_lines, t * NP, gl.SliceLayout(0, TILE))
        v = values.index(t).slice(first * ROWS, ROWS).load(gl.SliceLayout(1, TILE)).to(gl.float32)
        tile = advance(tile, k, v, decay, beta_lines.index(t).load(gl.SliceLayout(1, TILE)))
    return tile


@gluon.jit(do_not_specialize=["num_requests", "window", "heads"])
def direct_fold_kernel(
    x_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, history_ptr, state_ptr, slots_ptr, accepted_ptr,
    num_requests, window, heads, history_layer, history_slot, history_row, state_layer, state_slot,
    ROWS: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr, TAPS: gl.constexpr,
):  # fmt: skip
    """Grid (heads x K / ROWS / TILES, N, L). Arguments as `triton_fold.fold_kernel`; heads of 128, a window of up to 8.
    A program has TILES neighbouring tiles: the first in registers, the others are copied into shared memory at once."""
    MANY: gl.constexpr = ROWS * TILES
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    THIN: gl.constexpr = gl.BlockedLayout([1, 4], [128 // MANY, MANY // 4], [WARPS, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    kind: gl.constexpr = v_ptr.dtype.element_ty
    chunk, h = gl.program_id(0) % (K // MANY), gl.program_id(0) // (K // MANY)
    n, layer = gl.program_id(1), gl.program_id(2).to(gl.int64)
    slot, count = gl.load(slots_ptr + n).to(gl.int64), gl.load(accepted_ptr + n).to(gl.int32)
    if (slot == 0) | (count == 0):
        return
    keys = gl.allocate_shared_memory(gl.float32, [1, MOST, K], FLAT)
    decays = gl.allocate_shared_memory(gl.float32, [1, MOST, K], FLAT)
    values = gl.allocate_shared_memory(kind, [1, MOST, MANY], FLAT)
    betas = gl.allocate_shared_memory(gl.float32, [1, MOST], LINE)
    lines = (
        keys._reinterpret(gl.float32, [MOST * NP, PART], LINE),
        decays._reinterpret(gl.float32, [MOST * NP, PART], LINE),
        values._reinterpret(kind, [MOST, MANY], LINE), betas._reinterpret(gl.float32, [MOST, 1], LINE),
    )  # fmt: skip
    pointers = (state_ptr, k_ptr, decay_ptr, v_ptr, beta_ptr, slots_ptr, accepted_ptr)
    line = (layer * num_requests + n) * window * heads + h
    ask_records(0, line, chunk, count, pointers, (keys, decays, values, betas), heads, MANY, WIDE, THIN, ONE)
    async_copy.commit_group()
    row, key = gl.arange(0, ROWS, gl.SliceLayout(1, TILE)), gl.arange(0, PART, gl.SliceLayout(0, TILE))
    start = state_ptr + (layer * state_layer + slot * state_slot + (h * K + chunk * MANY) * K)
    places = start + (row[:, None] * K + key[None, :])
    tile = ()
    for p in gl.static_range(NP):
        tile += (gl.load(places + p * PART),)
    history = history_ptr + layer * history_layer + slot * history_slot
    inputs = x_ptr + (layer * num_requests + n) * window * (heads * 3 * K)
    past, channel, live = load_kept(inputs, history, h, count, heads, history_row, chunk == 0, TAPS, WIDE)
    if TILES > 1:
        later = gl.allocate_shared_memory(gl.float32, [(TILES - 1) * NP, ROWS, PART], FLAT)
        for c in gl.static_range(TILES - 1):
            ask_tile(c, start + (c + 1) * ROWS * K, later, ROWS, TILE)
    gl.thread_barrier()  # else the compiler asks for the state after the wait
    async_copy.wait_group(TILES - 1)
    gl.thread_barrier()  # what every warp copied is there
    for c in gl.static_range(TILES):
        if c > 0:
            async_copy.wait_group(TILES - 1 - c)  # a thread loads what it has copied itself
            tile = load_parts(later, (c - 1) * NP, TILE)
        tile = advance_all(tile, count, c, lines, ROWS, TILE)
        for p in gl.static_range(NP):
            gl.store(places + (c * ROWS * K + p * PART), tile[p])
    gl.thread_barrier()  # inputs may have been read by two warps, and the later must not find what the other wrote
    for j in gl.static_range(TAPS - 1):
        gl.store(history + j * history_row + channel, past[j], mask=live)
