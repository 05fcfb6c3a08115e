# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of the KDA decode step and of the fold of accepted draft tokens.

One program owns a whole head of one request: it alone reads and writes that head's state and history, so both move in
place without an ordering between programs. The state is read once and written once. Offsets of slots, layers and rows
are 64 bits wide. Slot 0 is the sink: its programs write zeros to the output and touch no state.
Launched by `fused`; needs triton. Source: spec/kernels.md A.1, B.4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baltoro.kernels.kda.triton_token import (
    advance,
    conv_token,
    gated_norm,
    log_decay,
    shifted_history,
    sigmoid,
    store_history,
)


@triton.jit
def decode_kernel(
    x_ptr, raw_ptr, b_ptr, gate_ptr, conv_ptr, a_log_ptr, bias_ptr, norm_ptr, history_ptr, state_ptr, slots_ptr,
    out_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr,
    x_row, raw_row, b_row, gate_row, history_slot, history_row, state_slot, bound, scale, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, IS_BOUNDED: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """Grid (H, N). RECORDS: also write what a Window of one token holds, [N, H, *]."""
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys, values = tl.arange(0, BK), tl.arange(0, BV)
    has_key, has_value = keys < K, values < V
    out = out_ptr + (n * H + h) * V + values
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if slot == 0:
        tl.store(out, tl.zeros([BV], tl.float32).to(out_ptr.dtype.element_ty), mask=has_value)
        return
    places = values[:, None] * K + keys[None, :]
    is_inside = has_value[:, None] & has_key[None, :]
    state = state_ptr + slot * state_slot + h * (V * K) + places
    matrix = tl.load(state, mask=is_inside, other=0.0)  # first, so that it is under way during the rest

    history, x = history_ptr + slot * history_slot, x_ptr + n * x_row
    cq, ck, cv = h * K + keys, (H + h) * K + keys, 2 * H * K + h * V + values
    q = conv_token(x + cq, conv_ptr, history, cq, has_key, history_row, TAPS)
    k = conv_token(x + ck, conv_ptr, history, ck, has_key, history_row, TAPS)
    v = conv_token(x + cv, conv_ptr, history, cv, has_value, history_row, TAPS)
    new_q = shifted_history(x + cq, history, cq, has_key, 1, history_row, 0, TAPS, ROWS)
    new_k = shifted_history(x + ck, history, ck, has_key, 1, history_row, 0, TAPS, ROWS)
    new_v = shifted_history(x + cv, history, cv, has_value, 1, history_row, 0, TAPS, ROWS)
    tl.debug_barrier()
    store_history(new_q, history, cq, has_key, history_row, TAPS, ROWS)
    store_history(new_k, history, ck, has_key, history_row, TAPS, ROWS)
    store_history(new_v, history, cv, has_value, history_row, TAPS, ROWS)

    q *= scale / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6)
    k *= 1.0 / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
    raw = tl.load(raw_ptr + n * raw_row + h * K + keys, mask=has_key, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + h * K + keys, mask=has_key, other=0.0)
    decay = tl.exp(log_decay(raw, bias, tl.load(a_log_ptr + h), bound, IS_BOUNDED))
    beta = sigmoid(tl.load(b_ptr + n * b_row + h).to(tl.float32))
    decayed, u, new = advance(matrix, k, v, decay, beta)
    # S+' q = (decayed S)' q + (q k) u: the output needs no second pass over what was written
    o = tl.sum(decayed * q[None, :], axis=1) + tl.sum(q * k, axis=0) * u
    tl.store(state, new, mask=is_inside)
    gate = tl.load(gate_ptr + n * gate_row + h * V + values, mask=has_value, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + values, mask=has_value, other=0.0)
    o = gated_norm(o, gate, weight, V, eps)
    tl.store(out, o.to(out_ptr.dtype.element_ty), mask=has_value)
    if RECORDS:
        row = n * H + h
        tl.store(k_ptr + row * K + keys, k, mask=has_key)
        tl.store(v_ptr + row * V + values, v.to(v_ptr.dtype.element_ty), mask=has_value)
        tl.store(decay_ptr + row * K + keys, decay, mask=has_key)
        tl.store(beta_ptr + row, beta)


@triton.jit
def fold_kernel(
    x_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, history_ptr, state_ptr, slots_ptr, accepted_ptr,
    num_requests, window, history_layer, history_slot, history_row, state_layer, state_slot,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (H, N, L). The tile of a program is `decode_kernel`'s."""
    h, n, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = tl.load(accepted_ptr + n)
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if (slot == 0) | (count == 0):
        return
    keys, values = tl.arange(0, BK), tl.arange(0, BV)
    has_key, has_value = keys < K, values < V
    is_inside = has_value[:, None] & has_key[None, :]
    state = state_ptr + layer * state_layer + slot * state_slot + h * (V * K)
    state += values[:, None] * K + keys[None, :]
    matrix = tl.load(state, mask=is_inside, other=0.0)
    first = (layer * num_requests + n) * window
    for t in range(count):
        row = (first + t) * H + h
        k = tl.load(k_ptr + row * K + keys, mask=has_key, other=0.0)
        v = tl.load(v_ptr + row * V + values, mask=has_value, other=0.0).to(tl.float32)
        decay = tl.load(decay_ptr + row * K + keys, mask=has_key, other=1.0)
        _, _, matrix = advance(matrix, k, v, decay, tl.load(beta_ptr + row))
    tl.store(state, matrix, mask=is_inside)

    width = H * (2 * K + V)
    history, x = history_ptr + layer * history_layer + slot * history_slot, x_ptr + first * width
    cq, ck, cv = h * K + keys, (H + h) * K + keys, 2 * H * K + h * V + values
    new_q = shifted_history(x + cq, history, cq, has_key, count, history_row, width, TAPS, ROWS)
    new_k = shifted_history(x + ck, history, ck, has_key, count, history_row, width, TAPS, ROWS)
    new_v = shifted_history(x + cv, history, cv, has_value, count, history_row, width, TAPS, ROWS)
    tl.debug_barrier()
    store_history(new_q, history, cq, has_key, history_row, TAPS, ROWS)
    store_history(new_k, history, ck, has_key, history_row, TAPS, ROWS)
    store_history(new_v, history, cv, has_value, history_row, TAPS, ROWS)
