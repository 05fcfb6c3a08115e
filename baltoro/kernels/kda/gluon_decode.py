# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""The KDA decode step in Gluon, for many heads: states come by asynchronous copies that run on from head to head.

As `triton_decode`, for heads of 128. As many programs as run at a time go through all heads; a state comes in pieces of
ROWS rows into a ring of BUFFERS, the first ones of the next head while this one is computed. What comes before the
state is one tile [4, 128] of q, k, v and decay, whose inputs are loaded one head ahead; it reaches the state's layout
through shared memory. Products and sums of a state are those of `triton_token.advance`.
The interpreter does not know Gluon. Launched by `fused`; needs triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

K: gl.constexpr = gl.constexpr(128)
PART: gl.constexpr = gl.constexpr(32)
NP: gl.constexpr = gl.constexpr(4)
TAPS: gl.constexpr = gl.constexpr(4)
FLAT: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def sigmoid(x):
    """As `triton_token.sigmoid`."""
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def ask(item, total, piece, at, state_ptr, slots_ptr, tiles, heads, state_slot, ROWS: gl.constexpr, TILE: gl.constexpr):
    """Begin to copy a piece of a head's state into the buffer `at`, which is free."""
    slot = gl.load(slots_ptr + item // heads, mask=item < total, other=0).to(gl.int64)
    row, key = gl.arange(0, ROWS, gl.SliceLayout(1, TILE)), gl.arange(0, PART, gl.SliceLayout(0, TILE))
    start = state_ptr + (slot * state_slot + (item % heads * K + piece * ROWS) * K)
    for p in gl.static_range(NP):
        places = start + (row[:, None] * K + (key[None, :] + p * PART))
        async_copy.async_copy_global_to_shared(tiles.index(at * NP + p), places, mask=(row[:, None] >= 0) & (slot != 0))
    async_copy.commit_group()


@gluon.jit
def load_inputs(
    item, total, x_ptr, raw_ptr, b_ptr, conv_ptr, a_log_ptr, bias_ptr, history_ptr, slots_ptr, heads,
    x_row, raw_row, b_row, history_slot, history_row, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Of a head: slot, log of its rate, beta's logit, then [4, K]: newest inputs, raw gates, their bias, weights of the
    taps, past inputs."""
    is_there = item < total
    n, h = (item // heads).to(gl.int64), item % heads
    slot = gl.load(slots_ptr + n, mask=is_there, other=0).to(gl.int64)
    kind = gl.arange(0, 4, gl.SliceLayout(1, LAYOUT))[:, None]
    place = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))[None, :]
    live, has_gate = is_there & (kind < 3) & (place >= 0), is_there & (kind == 3) & (place >= 0)
    channel = (kind * heads + h) * K + place
    newest = gl.load(x_ptr + n * x_row + channel, mask=live, other=0.0)
    raw = gl.load(raw_ptr + n * raw_row + h * K + place + kind * 0, mask=has_gate, other=0.0)
    bias = gl.load(bias_ptr + h * K + place + kind * 0, mask=has_gate, other=0.0)
    a_log = gl.load(a_log_ptr + h, mask=is_there, other=0.0)
    b = gl.load(b_ptr + n * b_row + h, mask=is_there, other=0.0)
    taps, past = (), ()
    for j in gl.static_range(TAPS):
        taps += (gl.load(conv_ptr + channel * TAPS + j, mask=live, other=0.0),)
    history = history_ptr + slot * history_slot + channel
    for j in gl.static_range(TAPS - 1):
        past += (gl.load(history + j * history_row, mask=live & (slot != 0), other=0.0),)
    return slot, a_log, b, newest, raw, bias, taps, past


@gluon.jit
def make_token(inputs, bound, scale, LAYOUT: gl.constexpr):
    """[4, K] of q, k, v and decay, FP32."""
    _, a_log, _, newest, raw, bias, taps, past = inputs
    kind = gl.arange(0, 4, gl.SliceLayout(1, LAYOUT))[:, None]
    total = newest.to(gl.float32) * taps[TAPS - 1]
    for j in gl.static_range(TAPS - 1):
        total += past[j].to(gl.float32) * taps[j]
    token = (total * sigmoid(total)).to(newest.dtype).to(gl.float32)
    g = bound * sigmoid(gl.exp(a_log) * (raw.to(gl.float32) + bias))
    token = gl.where(kind == 3, gl.exp(g), token)
    length = 1.0 / gl.sqrt(gl.sum(token * token, axis=1) + 1e-6)[:, None]
    return token * gl.where(kind == 0, length * scale, gl.where(kind == 1, length, 1.0))


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
def dot_vectors(a, b):
    """Sum over K of two vectors."""
    total = a[0] * b[0]
    for p in gl.static_range(1, NP):
        total = gl.fma(a[p], b[p], total)
    return gl.sum(total, axis=0)


@gluon.jit
def move(tile, rows, is_live, q, k, v, decay, beta, q_k):
    """A piece of a state one token on, written to pointers rows [R, PART] where live [R, 1] -> its answer to q [R]."""
    decayed = ()
    for p in gl.static_range(NP):
        decayed += (tile[p] * decay[p][None, :],)
    u = beta * (v - dot_keys(decayed, k))
    for p in gl.static_range(NP):
        new = gl.fma(u[:, None], k[p][None, :], decayed[p])
        gl.store(rows + p * PART, new, mask=is_live)
    return dot_keys(decayed, q) + q_k * u


@gluon.jit(do_not_specialize=["num_requests", "heads"])
def copied_decode_kernel(
    x_ptr, raw_ptr, b_ptr, gate_ptr, conv_ptr, a_log_ptr, bias_ptr, norm_ptr, history_ptr, state_ptr, slots_ptr,
    out_ptr, num_requests, heads, x_row, raw_row, b_row, gate_row, history_slot, history_row, state_slot,
    bound, scale, eps, ROWS: gl.constexpr, WARPS: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Grid (programs that run at a time). As `triton_decode.decode_kernel` for bounded gates, four taps, no records."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    PIECES: gl.constexpr = K // ROWS
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    tiles = gl.allocate_shared_memory(gl.float32, [BUFFERS * NP, ROWS, PART], FLAT)
    made = gl.allocate_shared_memory(gl.float32, [4, K], FLAT)
    parts = made._reinterpret(gl.float32, [4 * NP, PART], LINE)
    values = made._reinterpret(gl.float32, [4 * PIECES, ROWS], LINE)
    first, programs, total = gl.program_id(0), gl.num_programs(0), heads * num_requests
    for one in gl.static_range(BUFFERS - 1):
        ask(
            first + one // PIECES * programs, total, one % PIECES, one, state_ptr, slots_ptr, tiles, heads, state_slot,
            ROWS, TILE,
        )  # fmt: skip
    inputs = load_inputs(
        first, total, x_ptr, raw_ptr, b_ptr, conv_ptr, a_log_ptr, bias_ptr, history_ptr, slots_ptr, heads,
        x_row, raw_row, b_row, history_slot, history_row, WIDE,
    )  # fmt: skip
    row, key = gl.arange(0, ROWS, ROW), gl.arange(0, PART, gl.SliceLayout(0, TILE))
    kind, place = gl.arange(0, 4, gl.SliceLayout(1, WIDE))[:, None], gl.arange(0, K, gl.SliceLayout(0, WIDE))[None, :]
    for item in range(first, total, programs):
        n, h, done = (item // heads).to(gl.int64), item % heads, (item - first) // programs * PIECES
        slot, past, newest = inputs[0], inputs[7], inputs[3]
        token, beta = make_token(inputs, bound, scale, WIDE), sigmoid(inputs[2].to(gl.float32))
        gl.thread_barrier()  # every warp has read what the head before left there
        made.store(token)
        gl.thread_barrier()
        k, q = load_parts(parts, NP, gl.SliceLayout(0, TILE)), load_parts(parts, 0, gl.SliceLayout(0, TILE))
        decay = load_parts(parts, 3 * NP, gl.SliceLayout(0, TILE))
        history = history_ptr + slot * history_slot + (kind * heads + h) * K + place
        live = (kind < 3) & (place >= 0) & (slot != 0)
        for j in gl.static_range(TAPS - 2):
            gl.store(history + j * history_row, past[j + 1], mask=live)
        gl.store(history + (TAPS - 2) * history_row, newest.to(history_ptr.dtype.element_ty), mask=live)
        inputs = load_inputs(
            item + programs, total, x_ptr, raw_ptr, b_ptr, conv_ptr, a_log_ptr, bias_ptr, history_ptr, slots_ptr, heads,
            x_row, raw_row, b_row, history_slot, history_row, WIDE,
        )  # fmt: skip
        q_k, o, squares = dot_vectors(q, k), (), 0.0
        for c in gl.static_range(PIECES):
            at, later = (done + c) % BUFFERS, c + BUFFERS - 1
            async_copy.wait_group(BUFFERS - 2)
            gl.thread_barrier()  # what every warp copied is there, and every warp is done with the buffer before
            ask(
                item + later // PIECES * programs, total, later % PIECES, (done + later) % BUFFERS, state_ptr,
                slots_ptr, tiles, heads, state_slot, ROWS, TILE,
            )  # fmt: skip
            tile, v = load_parts(tiles, at * NP, TILE), values.index(2 * PIECES + c).load(ROW)
            rows = state_ptr + (slot * state_slot + (h * K + c * ROWS) * K) + (row[:, None] * K + key[None, :])
            o += (move(tile, rows, (row[:, None] >= 0) & (slot != 0), q, k, v, decay, beta, q_k),)
            squares += gl.sum(o[c] * o[c], axis=0)
        length = 1.0 / gl.sqrt(squares / K + eps)
        for c in gl.static_range(PIECES):
            value = h * K + c * ROWS + row
            gate = gl.load(gate_ptr + n * gate_row + value).to(gl.float32)
            result = o[c] * (length * gl.load(norm_ptr + c * ROWS + row) * sigmoid(gate))
            result = gl.where(slot != 0, result, 0.0)
            gl.store(out_ptr + n * heads * K + value, result.to(out_ptr.dtype.element_ty))
