# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Triton kernel of the KDA decode step.

One program owns a whole head of one request: it alone reads and writes that head's state and history, so both move in
place without an ordering between programs. The state is read once and written once. Offsets of slots and rows are 64
bits wide. Slot 0 is the sink: its programs write zeros to the output and touch no state.

What comes before the state (convolution, gate, L2 norm) is one tile [BC, 4] of q, k, v and decay, a value or four to
a thread: computed in the state's layout it would be repeated in every warp and cost more than the state. Loads that do
not wait for the slot come first, then the history, then the state's first chunk, which travels while the rest is
computed.
Launched by `fused`; needs triton. Source: spec/kernels.md A.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baltoro.kernels.kda.triton_token import (
    advance,
    await_inputs,
    cut,
    dot_keys,
    fetch,
    glue,
    load_state,
    load_taps,
    log_decay,
    sigmoid,
    split_taps,
    store_state,
)


@triton.jit
def record(token, k_ptr, v_ptr, decay_ptr, line, K: tl.constexpr, V: tl.constexpr):
    """Write k, v and decay of a tile [BC, (q, k, v, decay)]; line: row of the records."""
    kind, place = tl.arange(0, 4)[None, :], tl.arange(0, token.shape[0])[:, None]
    tl.store(k_ptr + line * K + place + kind * 0, token, mask=(kind == 1) & (place < K))
    tl.store(v_ptr + line * V + place + kind * 0, token.to(v_ptr.dtype.element_ty), mask=(kind == 2) & (place < V))
    tl.store(decay_ptr + line * K + place + kind * 0, token, mask=(kind == 3) & (place < K))


@triton.jit
def move(
    tile, rows, q, k, v, decay, beta, K: tl.constexpr, V: tl.constexpr, PART: tl.constexpr, NP: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Move a head's state by one token, in place -> its answer to q [CHUNKS x ROWS]. tile: the first chunk, loaded;
    rows: pointers to its rows; v: a tuple of chunks."""
    row, q_k, o = tl.arange(0, ROWS), dot_keys(q, k, NP), ()
    for c in tl.static_range(CHUNKS):
        ahead = tile
        if c + 1 < CHUNKS:
            ahead = load_state(rows + (c + 1) * ROWS * K, row + (c + 1) * ROWS < V, K, PART, NP)
        decayed, u, new = advance(tile, k, v[c], decay, beta, NP)
        # S+' q = (decayed S)' q + (q k) u: the output needs no second pass over what was written
        o += (dot_keys(decayed, q, NP) + q_k * u,)
        store_state(rows + c * ROWS * K, row + c * ROWS < V, new, K, PART, NP)
        tile = ahead
    return glue(o, 0, CHUNKS)


@triton.jit
def load_past(history, history_row, live, TAPS: tl.constexpr):
    """The inputs before the newest, a tuple."""
    past = ()
    for j in tl.static_range(TAPS - 1):
        past += (tl.load(history + j * history_row, mask=live, other=0.0),)
    return past


@triton.jit
def store_past(history, history_row, past, newest, live, TAPS: tl.constexpr):
    """One step on: without the oldest, with the newest."""
    for j in tl.static_range(TAPS - 2):
        tl.store(history + j * history_row, past[j + 1], mask=live)
    if TAPS > 1:
        tl.store(history + (TAPS - 2) * history_row, newest.to(history.dtype.element_ty), mask=live)


@triton.jit
def convolve_newest(newest, past, every, TAPS: tl.constexpr):
    """SiLU of the convolution at the newest input, rounded to its dtype, in FP32."""
    taps = split_taps(every, TAPS)
    total = newest.to(tl.float32) * taps[TAPS - 1]
    for j in tl.static_range(TAPS - 1):
        total += past[j].to(tl.float32) * taps[j]
    return (total * sigmoid(total)).to(newest.dtype).to(tl.float32)


@triton.jit
def decode_kernel(
    x_ptr, raw_ptr, b_ptr, gate_ptr, conv_ptr, a_log_ptr, bias_ptr, norm_ptr, history_ptr, state_ptr, slots_ptr,
    out_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr,
    x_row, raw_row, b_row, gate_row, history_slot, history_row, state_slot, bound, scale, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
    TAPS: tl.constexpr, IS_BOUNDED: tl.constexpr, RECORDS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (H, N). BC: the power of two for K and V. The state moves in BC / ROWS chunks, one of them ahead.
    RECORDS: also write what a Window of one token holds, [N, H, *]. AHEAD: fetch the state of the program so many
    further on (0: this one) into the L2 cache, -1: none; V K must be a multiple of 4."""
    NP: tl.constexpr = BC // PART
    BT: tl.constexpr = triton.next_power_of_2(TAPS)
    CHUNKS: tl.constexpr = BC // ROWS
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    await_inputs(PDL)
    kind, place, values = tl.arange(0, 4)[None, :], tl.arange(0, BC)[:, None], tl.arange(0, BC)
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if AHEAD > 0:
        later = tl.program_id(1) * H + h + AHEAD
        later_slot = tl.load(slots_ptr + later // H, mask=later < tl.num_programs(1) * H, other=0).to(tl.int64)
    # kinds: q, k, v and, in the place of a fourth stream, the gate
    live = ((kind < 2) & (place < K)) | ((kind == 2) & (place < V))
    channel = tl.where(kind < 2, (kind * H + h) * K, 2 * H * K + h * V) + place
    has_gate, has_value = (kind == 3) & (place < K), values < V
    newest = tl.load(x_ptr + n * x_row + channel, mask=live, other=0.0)
    raw = tl.load(raw_ptr + n * raw_row + h * K + place + kind * 0, mask=has_gate, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + h * K + place + kind * 0, mask=has_gate, other=0.0)
    a_log, beta = tl.load(a_log_ptr + h), sigmoid(tl.load(b_ptr + n * b_row + h).to(tl.float32))
    gate = tl.load(gate_ptr + n * gate_row + h * V + values, mask=has_value, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + values, mask=has_value, other=0.0)
    out = out_ptr + (n * H + h) * V + values
    every = load_taps(conv_ptr, channel, live, TAPS, BT)
    if slot == 0:
        tl.store(out, tl.zeros([BC], tl.float32).to(out_ptr.dtype.element_ty), mask=has_value)
        return

    if AHEAD == 0:  # the compiler asks for the state only after the convolution, whatever the order here
        fetch(state_ptr + slot * state_slot + h * (V * K), V * K * 4)
    history = history_ptr + slot * history_slot + channel
    past = load_past(history, history_row, live, TAPS)
    rows = state_ptr + slot * state_slot + h * (V * K) + tl.arange(0, ROWS) * K
    tile = load_state(rows, tl.arange(0, ROWS) < V, K, PART, NP)
    if AHEAD > 0:  # noqa: SIM102 - known at compile time, the next is not
        if later_slot != 0:
            fetch(state_ptr + later_slot * state_slot + (later % H) * (V * K), V * K * 4)
    token = convolve_newest(newest, past, every, TAPS)
    token = tl.where(kind == 3, tl.exp(log_decay(raw, bias, a_log, bound, IS_BOUNDED)), token)
    length = 1.0 / tl.sqrt(tl.sum(token * token, axis=0) + 1e-6)[None, :]
    token *= tl.where(kind == 0, length * scale, tl.where(kind == 1, length, 1.0))
    tl.debug_barrier()  # no thread may still have to read what another writes
    store_past(history, history_row, past, newest, live, TAPS)
    if RECORDS:
        record(token, k_ptr, v_ptr, decay_ptr, n * H + h, K, V)
        tl.store(beta_ptr + n * H + h, beta)

    # [BC, 4] -> [BC, (q k | v decay)] and apart
    first, second = tl.split(tl.reshape(token, (BC, 2, 2)))
    q, v = tl.split(first)
    k, decay = tl.split(second)
    q, k, decay = cut(q, NP), cut(k, NP), cut(decay, NP)
    o = move(tile, rows, q, k, cut(v, CHUNKS), decay, beta, K, V, PART, NP, ROWS, CHUNKS)
    o *= (1.0 / tl.sqrt(tl.sum(o * o, axis=0) / V + eps)) * weight * sigmoid(gate)
    tl.store(out, o.to(out_ptr.dtype.element_ty), mask=has_value)
