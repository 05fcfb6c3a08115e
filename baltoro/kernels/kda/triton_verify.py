# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernel that runs a draft window through a KDA layer without moving its state.

Per head, with rows K~ = k e^G and Q~ = q e^G of the window (G: log-decay summed from its start):

    P = K~ S, O = Q~ S    one product of the window against the state: its only reading
    for each token j:     u_j is row j of beta (v - P); rows i > j of that lose beta a_kk[i, j] u_j,
                          rows i >= j of O gain a_qk[i, j] u_j

The decays between pairs of tokens are formed as e^(G_i - G_j) <= 1, so any gate works. Keys, values, decays and
beta are recorded for the fold; history and state are never written.
Launched by `fused`; needs triton. Source: spec/kernels.md A.3, B.4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baltoro.kernels.kda.triton_token import gated_norm, log_decay, sigmoid


@triton.jit
def conv_window(
    x, kept, weight, history, channel, live, x_row, kept_row, history_row, window: tl.constexpr, BG: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """[BG, channels]: as `conv_token` for every token of the window; copies the inputs to `kept`."""
    row = tl.arange(0, BG)[:, None]
    mask = (row < window) & live[None, :]
    value = tl.load(x + row * x_row + channel[None, :], mask=mask, other=0.0)
    tl.store(kept + row * kept_row + channel[None, :], value, mask=mask)
    total = value.to(tl.float32) * tl.load(weight + channel * TAPS + TAPS - 1, mask=live, other=0.0)[None, :]
    for j in tl.static_range(TAPS - 1):
        place = row + j - (TAPS - 1)
        new = tl.load(x + place * x_row + channel[None, :], mask=mask & (place >= 0), other=0.0)
        old = tl.load(history + (row + j) * history_row + channel[None, :], mask=mask & (place < 0), other=0.0)
        past = tl.where(place >= 0, new.to(tl.float32), old.to(tl.float32))
        total += past * tl.load(weight + channel * TAPS + j, mask=live, other=0.0)[None, :]
    return (total * sigmoid(total)).to(value.dtype).to(tl.float32)


@triton.jit
def verify_kernel(
    x_ptr, raw_ptr, b_ptr, gate_ptr, conv_ptr, a_log_ptr, bias_ptr, norm_ptr, history_ptr, state_ptr, slots_ptr,
    out_ptr, kept_x_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr,
    x_row, raw_row, b_row, gate_row, history_slot, history_row, state_slot, bound, scale, eps,
    window: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, TAPS: tl.constexpr, IS_BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (H, N)."""
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys, values, row = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BG)
    has_key, has_value, is_row = keys < K, values < V, row < window
    row_keys, row_values = is_row[:, None] & has_key[None, :], is_row[:, None] & has_value[None, :]
    token = n * window + row
    out = out_ptr + (token[:, None] * H + h) * V + values[None, :]
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if slot == 0:
        tl.store(out, tl.zeros([BG, BV], tl.float32).to(out_ptr.dtype.element_ty), mask=row_values)
        return
    state = state_ptr + slot * state_slot + h * (V * K) + values[:, None] * K + keys[None, :]
    matrix = tl.load(state, mask=has_value[:, None] & has_key[None, :], other=0.0)

    width = H * (2 * K + V)
    x, kept, history = x_ptr + n * window * x_row, kept_x_ptr + n * window * width, history_ptr + slot * history_slot
    cq, ck, cv = h * K + keys, (H + h) * K + keys, 2 * H * K + h * V + values
    q = conv_window(x, kept, conv_ptr, history, cq, has_key, x_row, width, history_row, window, BG, TAPS)
    k = conv_window(x, kept, conv_ptr, history, ck, has_key, x_row, width, history_row, window, BG, TAPS)
    v = conv_window(x, kept, conv_ptr, history, cv, has_value, x_row, width, history_row, window, BG, TAPS)
    q *= scale / tl.sqrt(tl.sum(q * q, axis=1, keep_dims=True) + 1e-6)
    k *= 1.0 / tl.sqrt(tl.sum(k * k, axis=1, keep_dims=True) + 1e-6)
    raw = tl.load(raw_ptr + token[:, None] * raw_row + h * K + keys[None, :], mask=row_keys, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + h * K + keys, mask=has_key, other=0.0)[None, :]
    g = tl.where(row_keys, log_decay(raw, bias, tl.load(a_log_ptr + h), bound, IS_BOUNDED), 0.0)
    beta = sigmoid(tl.load(b_ptr + token * b_row + h, mask=is_row, other=0.0).to(tl.float32))
    head = (token * H + h)[:, None]
    tl.store(k_ptr + head * K + keys[None, :], k, mask=row_keys)
    tl.store(v_ptr + head * V + values[None, :], v.to(v_ptr.dtype.element_ty), mask=row_values)
    tl.store(decay_ptr + head * K + keys[None, :], tl.exp(g), mask=row_keys)
    tl.store(beta_ptr + token * H + h, beta, mask=is_row)

    total = tl.cumsum(g, axis=0)
    prefix = tl.exp(total)
    columns = tl.trans(matrix)
    rest = beta[:, None] * (v - tl.dot(k * prefix, columns, input_precision=PRECISION))
    o = tl.dot(q * prefix, columns, input_precision=PRECISION)
    for j in range(window):
        is_j = (row == j)[:, None]
        k_j, total_j = tl.sum(tl.where(is_j, k, 0.0), axis=0), tl.sum(tl.where(is_j, total, 0.0), axis=0)
        u_j = tl.sum(tl.where(is_j, rest, 0.0), axis=0)
        pair = tl.exp(tl.minimum(total - total_j[None, :], 0.0)) * k_j[None, :]
        a_kk, a_qk = tl.sum(k * pair, axis=1), tl.sum(q * pair, axis=1)
        rest -= tl.where(row > j, beta * a_kk, 0.0)[:, None] * u_j[None, :]
        o += tl.where(row >= j, a_qk, 0.0)[:, None] * u_j[None, :]
    gate = tl.load(gate_ptr + token[:, None] * gate_row + h * V + values[None, :], mask=row_values, other=0.0)
    weight = tl.load(norm_ptr + values, mask=has_value, other=0.0)[None, :]
    o = gated_norm(o, gate.to(tl.float32), weight, V, eps)
    tl.store(out, o.to(out_ptr.dtype.element_ty), mask=row_values)
