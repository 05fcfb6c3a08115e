# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Triton kernel that runs a draft window through a KDA layer without moving its state.

Per head, with 8 rows K~ = k e^G and 8 rows Q~ = q e^G of the window (G: log-decay summed from its start), and
N = -beta A_kk strictly below its diagonal, A_qk with it (A: products of rows decayed from the later to the earlier):

    [P; Q~ S] = [K~; Q~] S                            one 16-row product: the state's only reading
    O = Q~ S + Y beta (v - P)                         Y = A_qk (I - N)^-1 = A_qk (I + N)(I + N^2)(I + N^4)

Y needs no state: it is ready when the state arrives. The corrections u themselves are never formed, since the fold
takes raw inputs. Rows 0..7 of every 16-row tile are keys and rows 8..15 queries; N and A_qk are the upper and the lower
half of one matrix. Where e^-G may overflow (IS_MILD false), pairs are decayed by e^(G_i - G_j) <= 1 one by one.
Keys, values, decays and beta are recorded for the fold; history and state are never written.
Launched by `fused`; needs triton. Source: spec/kernels.md A.3, B.4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baltoro.kernels.kda.triton_token import await_inputs, fetch, fetch_lines, load_taps, log_decay, sigmoid, split_taps


@triton.jit
def load_window(
    x, history, channel, live, row, IS_PAST: tl.constexpr, window: tl.constexpr, BG: tl.constexpr, TAPS: tl.constexpr
):
    """What the convolution of channels [S, BC] takes: a tuple over the taps of tiles [S, BG, BC], of the window's own
    inputs x, or (IS_PAST, and not for the last tap) of those before it, zero where the other one has them."""
    token, place = tl.arange(0, BG)[None, :, None], channel[:, None, :]
    mask = live[:, None, :] & (token < window)
    tiles = ()
    for j in tl.static_range(TAPS - 1 if IS_PAST else TAPS):
        step = token + j - (TAPS - 1)
        if IS_PAST:
            tiles += (tl.load(history + (token + j) * row + place, mask=mask & (step < 0), other=0.0),)
        else:
            tiles += (tl.load(x + step * row + place, mask=mask & (step >= 0), other=0.0),)
    return tiles


@triton.jit
def convolve(new, past, every, TAPS: tl.constexpr):
    """Tiles of `load_window` and weights of `load_taps` -> [S, BG, BC]: SiLU of the convolution for every token of the
    window, rounded to the dtype of x, as FP32, zero where not live."""
    taps = split_taps(every, TAPS)
    step = tl.arange(0, new[0].shape[1])[None, :, None] - (TAPS - 1)
    total = new[TAPS - 1].to(tl.float32) * tl.trans(taps[TAPS - 1])[:, None, :]
    for j in tl.static_range(TAPS - 1):
        value = tl.where(step + j < 0, past[j].to(new[j].dtype), new[j])
        total += value.to(tl.float32) * tl.trans(taps[j])[:, None, :]
    return (total * sigmoid(total)).to(new[0].dtype).to(tl.float32)


@triton.jit
def keep(kept, tile, channel, live, row, window: tl.constexpr):
    """Copy a window's inputs [S, BG, BC]."""
    token = tl.arange(0, tile.shape[1])[None, :, None]
    tl.store(kept + token * row + channel[:, None, :], tile, mask=live[:, None, :] & (token < window))


@triton.jit
def window_decay(raw, live, bias, a_log, bound, IS_BOUNDED: tl.constexpr):
    """raw, live [BG, BC], bias [BC] -> log-decays [BG, BC] of the window; zero where there is no token or key."""
    g = tl.where(live, log_decay(raw.to(tl.float32), bias[None, :], a_log, bound, IS_BOUNDED), 0.0)
    return tl.max(g[None], axis=0)  # of one: what passes a reduction is not computed again in another layout


@triton.jit
def decayed_pairs(rows, total, window: tl.constexpr, IS_MILD: tl.constexpr, PRECISION: tl.constexpr):
    """rows [2, BG, BC] of keys and queries, total [BG, BC] -> [2 BG, 2 BG]: a_kk over a_qk in the first BG columns."""
    BG: tl.constexpr = total.shape[0]
    BC: tl.constexpr = total.shape[1]
    if IS_MILD:
        left = tl.reshape(rows * tl.exp(total)[None], (2 * BG, BC))
        right = tl.reshape(rows * tl.exp(-total)[None], (2 * BG, BC))
        pairs = tl.dot(left, tl.trans(right), input_precision=PRECISION)
    else:
        token, column = tl.arange(0, BG), tl.arange(0, 2 * BG)
        pairs = tl.zeros([2 * BG, 2 * BG], tl.float32)
        keys = tl.sum(tl.where(tl.arange(0, 2)[:, None, None] == 0, rows, 0.0), axis=0)
        for j in range(window):
            is_j = (token == j)[:, None]
            key, since = tl.sum(tl.where(is_j, keys, 0.0), axis=0), tl.sum(tl.where(is_j, total, 0.0), axis=0)
            pair = tl.exp(tl.minimum(total - since[None, :], 0.0)) * key[None, :]
            products = tl.reshape(tl.sum(rows * pair[None], axis=2), (2 * BG,))
            pairs += tl.where(column[None, :] == j, products[:, None], 0.0)
    return pairs


@triton.jit
def corrections(pairs, beta, BG: tl.constexpr, PRECISION: tl.constexpr):
    """pairs [2 BG, 2 BG], beta [2 BG] -> Y in the lower half of the first BG columns, zero elsewhere. BG is 8."""
    row, column = tl.arange(0, 2 * BG)[:, None], tl.arange(0, 2 * BG)[None, :]
    is_key, token = row < BG, row % BG
    both = tl.where(is_key, -beta[:, None], 1.0) * pairs
    both = tl.where((column < BG) & (column < token + tl.where(is_key, 0, 1)), both, 0.0)  # N over A_qk
    power = tl.dot(both, tl.where(is_key, both, 0.0), input_precision=PRECISION)
    both += power
    power = tl.where(is_key, power, 0.0)  # N^2
    both += tl.dot(both, power, input_precision=PRECISION)
    power = tl.dot(power, power, input_precision=PRECISION)
    both += tl.dot(both, power, input_precision=PRECISION)
    return tl.where(is_key, 0.0, both)


@triton.jit
def record(
    rows, v, decay, k_ptr, v_ptr, decay_ptr, line, window: tl.constexpr, K: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """Write keys (rows [2, BG, BC], the first half), v [1, BG, BC] and decay [BG, BC]; line [BG, 1]: their rows."""
    half, place = tl.arange(0, 2)[:, None, None], tl.arange(0, decay.shape[1])[None, :]
    has_token = (tl.arange(0, decay.shape[0]) < window)[:, None]
    has_key, keys = has_token & (place < K), line * K + place
    tl.store(k_ptr + keys[None] + half * 0, rows, mask=(half == 0) & has_key[None])
    tl.store(v_ptr + (line * V + place)[None], v.to(v_ptr.dtype.element_ty), mask=(has_token & (place < V))[None])
    tl.store(decay_ptr + keys, decay, mask=has_key)


@triton.jit
def write(
    o, squares, gate, gate_row, norm, out, out_row, eps, window: tl.constexpr, V: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Gated RMSNorm of a tuple of chunks o [BG, ROWS]; squares [BG, ROWS]: their sum of squares, column by column."""
    ROWS: tl.constexpr = squares.shape[1]
    time = tl.arange(0, squares.shape[0])[:, None]
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / V + eps)[:, None]
    for c in tl.static_range(CHUNKS):
        value = c * ROWS + tl.arange(0, ROWS)[None, :]
        mask = (time < window) & (value < V)
        opened = sigmoid(tl.load(gate + time * gate_row + value, mask=mask, other=0.0).to(tl.float32))
        result = o[c] * scale * tl.load(norm + value, mask=value < V, other=0.0) * opened
        tl.store(out + time * out_row + value, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def fetch_ahead(gate, gate_row, state, window: tl.constexpr, K: tl.constexpr, V: tl.constexpr, AHEAD: tl.constexpr):
    """See `verify_kernel`."""
    if AHEAD > 0:
        fetch_lines(gate, gate_row, window, V)
    if AHEAD > 1:
        fetch(state, V * K * 4)


@triton.jit
def write_zeros(out, mask, BG: tl.constexpr, BC: tl.constexpr):
    """What a request without a slot gets."""
    tl.store(out, tl.zeros([BG, BC], tl.float32).to(out.dtype.element_ty), mask=mask)


@triton.jit
def load_values(v_ptr, token, has_token, value, h, H: tl.constexpr, V: tl.constexpr):
    """FP32 of recorded values [2 BG, ROWS]."""
    places = v_ptr + (token[:, None] * H + h) * V + value[None, :]
    return tl.load(places, mask=has_token[:, None] & (value < V)[None, :], other=0.0).to(tl.float32)


@triton.jit
def outputs(left, tile, v, beta, solved, is_query, BG: tl.constexpr, PRECISION: tl.constexpr):
    """[BG, ROWS] of keys over queries left [2 BG, BC], a state's rows tile [BC, ROWS] and values v [2 BG, ROWS]."""
    read = tl.dot(left, tile, input_precision=PRECISION)
    rest = tl.where(is_query[:, None], 0.0, beta[:, None] * (v - read))
    both = tl.reshape(tl.dot(solved, rest, read, input_precision=PRECISION), (2, BG, tile.shape[1]))
    return tl.sum(tl.where(tl.arange(0, 2)[:, None, None] == 1, both, 0.0), axis=0)


@triton.jit
def verify_kernel(
    x_ptr, raw_ptr, b_ptr, gate_ptr, conv_ptr, a_log_ptr, bias_ptr, norm_ptr, history_ptr, state_ptr, slots_ptr,
    out_ptr, kept_x_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr,
    x_row, raw_row, b_row, gate_row, history_slot, history_row, state_slot, bound, scale, eps,
    window: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr,
    ROWS: tl.constexpr, TAPS: tl.constexpr, AHEAD: tl.constexpr, IS_BOUNDED: tl.constexpr, IS_MILD: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (H, N). BG is 8; BC: the power of two, at least 16, for K and V; the state comes in BC / ROWS chunks.
    AHEAD: 1: fetch the gate into the L2 cache early on, 2: the state too; K and V are 128; 0: neither.

    A load that comes after a store waits for what is stored, so all loads but those come first, and of them those that
    need no slot."""
    CHUNKS: tl.constexpr = BC // ROWS
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    await_inputs(PDL)
    row, place = tl.arange(0, 2 * BG), tl.arange(0, BC)
    is_query, time, first = row >= BG, tl.arange(0, BG)[:, None], n * window
    token = first + row % BG
    has_token = row % BG < window
    slot = tl.load(slots_ptr + n).to(tl.int64)
    width, half = H * (2 * K + V), tl.arange(0, 2)[:, None]
    x, kept = x_ptr + first * x_row, kept_x_ptr + first * width
    keys, has_key = tl.where(half == 0, H + h, h) * K + place[None, :], (half < 2) & (place < K)[None, :]
    values, has_value = 2 * H * K + h * V + place[None, :], (place < V)[None, :]
    new_keys = load_window(x, x, keys, has_key, x_row, False, window, BG, TAPS)
    new_values = load_window(x, x, values, has_value, x_row, False, window, BG, TAPS)
    live = (time < window) & (place < K)[None, :]
    raw = tl.load(raw_ptr + first * raw_row + h * K + time * raw_row + place[None, :], mask=live, other=0.0)
    bias = tl.load(bias_ptr + h * K + place, mask=place < K, other=0.0)
    a_log, b = tl.load(a_log_ptr + h), tl.load(b_ptr + token * b_row + h, mask=has_token, other=0.0)
    key_taps = load_taps(conv_ptr, tl.trans(keys), tl.trans(has_key), TAPS, triton.next_power_of_2(TAPS))
    value_taps = load_taps(conv_ptr, tl.trans(values), tl.trans(has_value), TAPS, triton.next_power_of_2(TAPS))
    if slot == 0:
        write_zeros(out_ptr + ((first + time) * H + h) * V + place[None, :], (time < window) & has_value, BG, BC)
        return

    history = history_ptr + slot * history_slot
    old_keys = load_window(history, history, keys, has_key, history_row, True, window, BG, TAPS)
    old_values = load_window(history, history, values, has_value, history_row, True, window, BG, TAPS)
    state, gate = state_ptr + slot * state_slot + h * (V * K), gate_ptr + first * gate_row + h * V
    fetch_ahead(gate, gate_row, state, window, K, V, AHEAD)
    rows, v = convolve(new_keys, old_keys, key_taps, TAPS), convolve(new_values, old_values, value_taps, TAPS)
    length = 1.0 / tl.sqrt(tl.sum(rows * rows, axis=2) + 1e-6)
    rows *= (length * tl.where(half == 0, 1.0, scale))[:, :, None]
    g, beta = window_decay(raw, live, bias, a_log, bound, IS_BOUNDED), sigmoid(b.to(tl.float32))

    keep(kept, new_keys[TAPS - 1], keys, has_key, width, window)
    keep(kept, new_values[TAPS - 1], values, has_value, width, window)
    record(rows, v, tl.exp(g), k_ptr, v_ptr, decay_ptr, (first + time) * H + h, window, K, V)
    tl.store(beta_ptr + token * H + h, beta, mask=has_token & (is_query == 0))

    total = tl.cumsum(g, axis=0)
    solved = corrections(decayed_pairs(rows, total, window, IS_MILD, PRECISION), beta, BG, PRECISION)
    left = tl.reshape(rows * tl.exp(total)[None], (2 * BG, BC))
    tl.debug_barrier()  # v comes back from where it was recorded: a cheap way into the product's layout
    squares, o, is_place = tl.zeros([BG, ROWS], tl.float32), (), (place < K)[:, None]
    for c in tl.static_range(CHUNKS):
        value = c * ROWS + tl.arange(0, ROWS)
        tile = tl.load(state + value[None, :] * K + place[:, None], mask=is_place & (value < V)[None, :], other=0.0)
        v = load_values(v_ptr, token, has_token, value, h, H, V)
        o += (outputs(left, tile, v, beta, solved, is_query, BG, PRECISION),)
        squares += o[c] * o[c]
    out = out_ptr + (first * H + h) * V
    write(o, squares, gate, gate_row, norm_ptr, out, H * V, eps, window, V, CHUNKS)
