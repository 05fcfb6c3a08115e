# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Triton kernel that advances states of all layers by the accepted tokens of a draft window.

A program owns ROWS rows of a head's state: rows of V never meet, and small programs keep many loads under way. The
program of a head's first rows also moves its convolution inputs. The next token's vectors are loaded one step ahead.
Offsets of slots, layers and rows are 64 bits wide. Launched by `fused`; needs triton. Source: spec/kernels.md B.4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baltoro.kernels.kda.triton_token import advance, load_keys, load_state, store_state


@triton.jit
def fold_kernel(
    x_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, history_ptr, state_ptr, slots_ptr, accepted_ptr,
    num_requests, window, history_layer, history_slot, history_row, state_layer, state_slot,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Grid (H x V / ROWS, N, L). The order of sums is `decode_kernel`'s for the same PART."""
    NP: tl.constexpr = BC // PART
    CHUNKS: tl.constexpr = (V + ROWS - 1) // ROWS
    h, chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    n, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = tl.load(accepted_ptr + n)
    slot = tl.load(slots_ptr + n).to(tl.int64)
    if (slot == 0) | (count == 0):
        return
    row = chunk * ROWS + tl.arange(0, ROWS)
    has_row = row < V
    rows = state_ptr + layer * state_layer + slot * state_slot + h * (V * K) + row * K
    tile = load_state(rows, has_row, K, PART, NP)
    line = (layer * num_requests + n) * window * H + h
    k = load_keys(k_ptr + line * K, K, PART, NP, 0.0)
    decay = load_keys(decay_ptr + line * K, K, PART, NP, 1.0)
    v = tl.load(v_ptr + line * V + row, mask=has_row, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + line)
    for t in range(count):
        # the last step loads its own vectors again, and drops them
        line += tl.where(t + 1 < count, H, 0)
        next_k = load_keys(k_ptr + line * K, K, PART, NP, 0.0)
        next_decay = load_keys(decay_ptr + line * K, K, PART, NP, 1.0)
        next_v = tl.load(v_ptr + line * V + row, mask=has_row, other=0.0).to(tl.float32)
        next_beta = tl.load(beta_ptr + line)
        _, _, tile = advance(tile, k, v, decay, beta, NP)
        k, decay, v, beta = next_k, next_decay, next_v, next_beta
    store_state(rows, has_row, tile, K, PART, NP)
    if chunk == 0:
        inputs = x_ptr + (layer * num_requests + n) * window * (H * (2 * K + V))
        history = history_ptr + layer * history_layer + slot * history_slot
        shift_history(inputs, history, h, count, history_row, H, K, V, BC, TAPS)


@triton.jit
def shift_history(
    x, history, h, count, history_row, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """In place: a head's last TAPS - 1 inputs of q, k and v, after `count` more inputs x [count, 2HK + HV]."""
    kind, place = tl.arange(0, 4)[:, None], tl.arange(0, BC)[None, :]
    live = ((kind < 2) & (place < K)) | ((kind == 2) & (place < V))
    channel = tl.where(kind < 2, (kind * H + h) * K, 2 * H * K + h * V) + place
    kept = ()
    for j in tl.static_range(TAPS - 1):
        is_old = j + count < TAPS - 1
        old = tl.load(history + (j + count) * history_row + channel, mask=live & is_old, other=0.0)
        token = tl.where(is_old, 0, j + count - (TAPS - 1))
        new = tl.load(x + token * (H * (2 * K + V)) + channel, mask=live & (is_old == 0), other=0.0)
        kept += (tl.where(is_old, old, new.to(old.dtype)),)
    tl.debug_barrier()  # no thread may still have to read what another writes
    for j in tl.static_range(TAPS - 1):
        tl.store(history + j * history_row + channel, kept[j], mask=live)
