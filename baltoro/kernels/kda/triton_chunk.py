# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of the serial part of the KDA chunk form; the equations are `chunk`'s.

    scan_kernel       a program a segment, head and block of V rows: S -> S+ and the outputs, chunk after chunk
    fragment_kernel   the same recurrence from zero (S~) and from the identity without u (M), no outputs
    merge_kernel      a program a span, head and block of V rows: the state that enters each of its segments

They start from what `triton_prepare` makes. The running state is held transposed, [K, BV], and k R is loaded that way:
then every left factor of a product comes straight out of memory. One that was computed would sit in registers, and a
transposed sum of products there is what Triton 3.4 to 3.7.0 gets wrong on Hopper (flash-linear-attention issue 640).
Launched by `prefill`; needs triton. Source: spec/kernels.md A.3, A.6, A.8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baltoro.kernels.kda.triton_prepare import product


@triton.jit
def accumulate(a, b, total, KIND: tl.constexpr):
    """total + a b; KIND as in `product`."""
    if KIND == "bf16":
        out = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    else:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=KIND)
    return out


@triton.jit
def place_of(step, row, length, end, C: tl.constexpr):
    """First row and tokens of a segment's chunk. row, length: of its first chunk; end: row after its last."""
    first = row + tl.where(step > 0, length + (step - 1) * C, 0)
    return first, tl.minimum(tl.where(step > 0, C, length), end - first)


@triton.jit
def correction(w, solved, values, state, C: tl.constexpr, KIND: tl.constexpr, IS_DIRECT: tl.constexpr):
    """U of a chunk. IS_DIRECT: from k P, the inverse times beta, and v; else from w and u (`solved` is not used)."""
    rest = values.to(tl.float32) - product(w, state, KIND)
    if IS_DIRECT:
        rest = product(solved, rest, KIND)
    return rest


@triton.jit(do_not_specialize=["num_spans", "num_heads", "head_first"])
def scan_kernel(
    w_ptr, u_ptr, k_out_ptr, q_in_ptr, a_ptr, gamma_ptr, v_ptr, chunks_ptr, segments_ptr, order_ptr, entering_ptr,
    out_ptr, after_ptr, v_row, num_spans, num_heads, head_first,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, IS_CUT: tl.constexpr, KIND: tl.constexpr,
    IS_DIRECT: tl.constexpr,
):  # fmt: skip
    """Grid (V / BV, heads of the group, segments). entering: states of segments of this group (IS_CUT), or of spans and
    all heads, [.., heads, V, K]. out [T, H, V]; after [N + borders, H, V, K]. IS_DIRECT: as `prepare_kernel`."""
    block, h = tl.program_id(0), tl.program_id(1)
    segment = tl.load(order_ptr + tl.program_id(2)).to(tl.int64)
    span, first = tl.load(segments_ptr + segment * 4).to(tl.int64), tl.load(segments_ptr + segment * 4 + 1)
    count, is_last = tl.load(segments_ptr + segment * 4 + 2), tl.load(segments_ptr + segment * 4 + 3)
    heads, i, key = tl.num_programs(1), tl.arange(0, C), tl.arange(0, K)
    values = block * BV + tl.arange(0, BV)[None, :]
    tile, row = values * K + key[:, None], i[:, None] * K + key[None, :]
    square = i[:, None] * C + i[None, :]
    if IS_CUT:
        state = tl.load(entering_ptr + (segment * heads + h) * (V * K) + tile)
    else:
        state = tl.load(entering_ptr + (span * num_heads + head_first + h) * (V * K) + tile)
    leaving = after_ptr + (head_first + h) * (V * K) + tile
    first_row, first_length, end_row = edges(chunks_ptr, first, count)
    for step in range(count):
        c = (first + step).to(tl.int64)
        place = c * heads + h
        at = place * (C * K)
        token, length = place_of(step, first_row, first_length, end_row, C)
        token = token.to(tl.int64)
        is_live = i[:, None] < length
        w = tl.load(w_ptr + at + row)
        if IS_DIRECT:
            solved = tl.load(u_ptr + place * (C * C) + square)
            v_at = v_ptr + token * v_row + (head_first + h) * V + i[:, None] * v_row + values
            fixed = correction(w, solved, tl.load(v_at, mask=is_live, other=0.0), state, C, KIND, True)
        else:
            fixed = correction(w, w, tl.load(u_ptr + place * (C * V) + i[:, None] * V + values), state, C, KIND, False)
        o = product(tl.load(q_in_ptr + at + row), state, KIND)
        o = accumulate(tl.load(a_ptr + place * (C * C) + square), fixed, o, KIND)
        columns = tl.load(k_out_ptr + at + i[None, :] * K + key[:, None])
        gamma = tl.load(gamma_ptr + place * K + key)
        state = accumulate(columns, fixed, state * gamma[:, None], KIND)
        rows = out_ptr + ((token + i[:, None]) * num_heads + head_first + h) * V + values
        tl.store(rows, o.to(out_ptr.dtype.element_ty), mask=is_live)
        border = tl.load(chunks_ptr + c * 3 + 2).to(tl.int64)
        if border >= 0:
            tl.store(leaving + (num_spans + border) * num_heads * (V * K), state)
    if is_last != 0:
        tl.store(leaving + span * num_heads * (V * K), state)


@triton.jit
def edges(chunks_ptr, first, count):
    """First row and tokens of a segment's first chunk, and the row after its last; of no chunks: anything."""
    row, length, end = first * 0, first * 0, first * 0
    if count > 0:
        row, length = tl.load(chunks_ptr + first * 3), tl.load(chunks_ptr + first * 3 + 1)
        last = chunks_ptr + (first + count - 1) * 3
        end = tl.load(last) + tl.load(last + 1)
    return row, length, end


@triton.jit(do_not_specialize=["head_first"])
def fragment_kernel(
    w_ptr, u_ptr, k_out_ptr, gamma_ptr, v_ptr, chunks_ptr, segments_ptr, fragments_ptr, fragment_ptr, v_row, head_first,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, KIND: tl.constexpr, IS_DIRECT: tl.constexpr,
):  # fmt: skip
    """Grid ((V + K) / BV, heads of the group, fragments). fragment [segments, heads, V + K, K]: S~, then M."""
    block, h = tl.program_id(0), tl.program_id(1)
    segment = tl.load(fragments_ptr + tl.program_id(2)).to(tl.int64)
    first, count = tl.load(segments_ptr + segment * 4 + 1), tl.load(segments_ptr + segment * 4 + 2)
    heads, i, key = tl.num_programs(1), tl.arange(0, C), tl.arange(0, K)
    rows = block * BV + tl.arange(0, BV)[None, :]
    # rows past V are the identity's, which no u reaches
    state, has_values = tl.where(rows - V == key[:, None], 1.0, 0.0), rows < V
    first_row, first_length, end_row = edges(chunks_ptr, first, count)
    for step in range(count):
        place = (first + step).to(tl.int64) * heads + h
        at = place * (C * K)
        w = tl.load(w_ptr + at + i[:, None] * K + key[None, :])
        if IS_DIRECT:
            token, length = place_of(step, first_row, first_length, end_row, C)
            solved = tl.load(u_ptr + place * (C * C) + i[:, None] * C + i[None, :])
            v_at = v_ptr + token.to(tl.int64) * v_row + (head_first + h) * V + i[:, None] * v_row + rows
            v = tl.load(v_at, mask=has_values & (i[:, None] < length), other=0.0)
            fixed = correction(w, solved, v, state, C, KIND, True)
        else:
            u = tl.load(u_ptr + place * (C * V) + i[:, None] * V + rows, mask=has_values, other=0.0)
            fixed = correction(w, w, u, state, C, KIND, False)
        columns = tl.load(k_out_ptr + at + i[None, :] * K + key[:, None])
        gamma = tl.load(gamma_ptr + place * K + key)
        state = accumulate(columns, fixed, state * gamma[:, None], KIND)
    tl.store(fragment_ptr + (segment * heads + h) * ((V + K) * K) + rows * K + key[:, None], state)


@triton.jit(do_not_specialize=["num_heads", "head_first"])
def merge_kernel(
    state_ptr, spans_ptr, fragment_ptr, entering_ptr, num_heads, head_first,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Grid (spans, heads of the group, V / BV). state [N, H, V, K]; writes entering [segments, heads, V, K]."""
    n, h, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(spans_ptr + n * 2).to(tl.int64), tl.load(spans_ptr + n * 2 + 1)
    heads, keys, square = tl.num_programs(1), tl.arange(0, K)[None, :], tl.arange(0, K)[:, None]
    tile = (block * BV + tl.arange(0, BV))[:, None] * K + keys
    state = tl.load(state_ptr + (n * num_heads + head_first + h) * (V * K) + tile)
    for step in range(count):
        place = (first + step) * heads + h
        tl.store(entering_ptr + place * (V * K) + tile, state)
        if step + 1 < count:
            fragment = fragment_ptr + place * ((V + K) * K)
            matrix = tl.load(fragment + (V + square) * K + keys)
            state = product(state, matrix, KIND) + tl.load(fragment + tile)
