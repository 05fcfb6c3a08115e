# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of the KDA chunk form; the equations are `chunk`'s.

    prepare_kernel    a program a chunk and head: A_qk, w, u, k R, q P, P_C of the chunk, from its tokens alone
    scan_kernel       a program a segment, head and block of V rows: S -> S+ and the outputs, chunk after chunk
    fragment_kernel   the same recurrence from zero (S~) and from the identity without u (M), no outputs
    merge_kernel      a program a span, head and block of V rows: the state that enters each of its segments

Decays between pairs are never quotients: a chunk is halved down to single tokens, each half taking its decay from the
border between them, so every factor is at most 1 and any gate works. A bounded gate (>= -5) stops at FIRST = 16
tokens, whose factors around their middle lie within e^-40 .. e^40: half the products.
Launched by `prefill`; needs triton. Source: spec/kernels.md A.3, A.4, A.6, A.8.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, KIND: tl.constexpr):
    """a b with FP32 sums. KIND: "bf16" rounds the factors to it; else the input precision of an FP32 product."""
    if KIND == "bf16":
        out = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    else:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=KIND)
    return out


@triton.jit
def decays(g, C: tl.constexpr, HALF: tl.constexpr, BK: tl.constexpr):
    """Sums of g [C, BK] within groups of HALF rows: up to each row, it included; and after it."""
    grouped = tl.reshape(g, [C // HALF, HALF, BK])
    before = tl.cumsum(grouped, axis=1)
    after = tl.cumsum(grouped, axis=1, reverse=True) - grouped
    return tl.reshape(before, [C, BK]), tl.reshape(after, [C, BK])


@triton.jit
def corners(C: tl.constexpr, HALF: tl.constexpr):
    """bool [C, C]: row in the second, column in the first half of the same 2 HALF tokens."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return (i // (2 * HALF) == j // (2 * HALF)) & (i // HALF > j // HALF)


@triton.jit
def pairs_within(q, k, g, C: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr):
    """A_kk and A_qk [C, C] of pairs within groups of FIRST tokens, 1 or 16; zeros elsewhere."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if FIRST == 1:
        a_kk = tl.zeros([C, C], tl.float32)
        a_qk = tl.where(i == j, tl.sum(q * k, axis=1)[:, None], 0.0)
    else:
        before, after = decays(g, C, FIRST, BK)
        # any reference would do for a group; its middle keeps both factors small
        middle = (before - after) * 0.5
        to_row, columns = tl.exp(middle), tl.trans(k * tl.exp(-middle))
        is_group = i // FIRST == j // FIRST
        a_kk = tl.where(is_group & (i > j), product(k * to_row, columns, KIND), 0.0)
        a_qk = tl.where(is_group & (i >= j), product(q * to_row, columns, KIND), 0.0)
    return a_kk, a_qk


@triton.jit
def pairs_across(q, k, g, C: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr):
    """The same of pairs in the two halves of 2 HALF tokens."""
    before, after = decays(g, C, HALF, BK)
    to_row, columns = tl.exp(before), tl.trans(k * tl.exp(after))
    is_pair = corners(C, HALF)
    a_kk = tl.where(is_pair, product(k * to_row, columns, KIND), 0.0)
    return a_kk, tl.where(is_pair, product(q * to_row, columns, KIND), 0.0)


@triton.jit
def pair_products(q, k, g, C: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr):
    """A_kk without beta (strictly lower) and A_qk without scale (diagonal included), [C, C], over some channels."""
    a_kk, a_qk = pairs_within(q, k, g, C, BK, FIRST, KIND)
    for level in tl.static_range(7):
        if (FIRST << level) < C:
            more_kk, more_qk = pairs_across(q, k, g, C, BK, FIRST << level, KIND)
            a_kk += more_kk
            a_qk += more_qk
    return a_kk, a_qk


@triton.jit
def invert_unit_lower(lower, C: tl.constexpr, KIND: tl.constexpr):
    """(I + L)^-1 of a strictly lower L [C, C]: of a block [[A, 0], [B, D]] of inverses A, D, B becomes -D B A."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(corners(C, 1), lower, 0.0)
    for level in tl.static_range(1, 7):
        if (1 << level) < C:
            below = tl.where(corners(C, 1 << level), lower, 0.0)
            inverse -= product(inverse, product(below, inverse, KIND), KIND)
    return inverse


@triton.jit
def load_rows(x, mask, place):
    """FP32 of masked rows."""
    return tl.load(x + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, chunks_ptr, w_ptr, u_ptr, k_out_ptr, q_in_ptr, a_ptr, gamma_ptr,
    q_row, k_row, v_row, g_row, beta_row, head_first, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    FIRST: tl.constexpr, KIND: tl.constexpr, INVERSE_KIND: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, heads of the group). Rows past the chunk's tokens come out as zeros, which leave a state as it is.

    Goes over the channels in blocks of BLOCK, twice: all of them at once would not fit into the registers.
    """
    c, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, place = h + head_first, c * tl.num_programs(1) + h
    first, length = tl.load(chunks_ptr + c * 3).to(tl.int64), tl.load(chunks_ptr + c * 3 + 1)
    i, block = tl.arange(0, C), tl.arange(0, BLOCK)
    live = i < length
    token, is_live = (first + i)[:, None], live[:, None]
    beta = load_rows(beta_ptr, live, (first + i) * beta_row + head)[:, None]
    a_kk, a_qk = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for part in range(K // BLOCK):
        keys = head * K + part * BLOCK + block[None, :]
        k = load_rows(k_ptr, is_live, token * k_row + keys)
        q = load_rows(q_ptr, is_live, token * q_row + keys)
        g = load_rows(g_ptr, is_live, token * g_row + keys)
        more_kk, more_qk = pair_products(q, k, g, C, BLOCK, FIRST, KIND)
        a_kk += more_kk
        a_qk += more_qk
    square = place * (C * C) + i[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(a_ptr + square, (a_qk * scale).to(a_ptr.dtype.element_ty))
    inverse = invert_unit_lower(a_kk * beta, C, INVERSE_KIND)
    for part in range(K // BLOCK):
        keys = head * K + part * BLOCK + block[None, :]
        g = load_rows(g_ptr, is_live, token * g_row + keys)
        k = load_rows(k_ptr, is_live, token * k_row + keys)
        before, after = decays(g, C, C, BLOCK)
        prefix = tl.exp(before)
        at = place * (C * K) + i[:, None] * K + part * BLOCK + block[None, :]
        tl.store(k_out_ptr + at, (k * tl.exp(after)).to(k_out_ptr.dtype.element_ty))
        tl.store(w_ptr + at, product(inverse, k * beta * prefix, KIND).to(w_ptr.dtype.element_ty))
        q = load_rows(q_ptr, is_live, token * q_row + keys)
        tl.store(q_in_ptr + at, (q * prefix * scale).to(q_in_ptr.dtype.element_ty))
        tl.store(gamma_ptr + place * K + part * BLOCK + block, tl.exp(tl.sum(g, axis=0)))
    for part in range(V // BLOCK):
        values = part * BLOCK + block[None, :]
        v = load_rows(v_ptr, is_live, token * v_row + head * V + values)
        u = product(inverse, v * beta, KIND)
        tl.store(u_ptr + place * (C * V) + i[:, None] * V + values, u.to(u_ptr.dtype.element_ty))


@triton.jit
def scan_kernel(
    w_ptr, u_ptr, k_out_ptr, q_in_ptr, a_ptr, gamma_ptr, chunks_ptr, segments_ptr, order_ptr, entering_ptr, out_ptr,
    after_ptr, num_spans, num_heads, head_first,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, IS_CUT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Grid (segments, heads of the group, V / BV). entering: states of segments of this group (IS_CUT), or of spans and
    all heads, [.., heads, V, K]. out [T, H, V]; after [N + borders, H, V, K]."""
    h, block = tl.program_id(1), tl.program_id(2)
    segment = tl.load(order_ptr + tl.program_id(0)).to(tl.int64)
    span, first = tl.load(segments_ptr + segment * 4).to(tl.int64), tl.load(segments_ptr + segment * 4 + 1)
    count, is_last = tl.load(segments_ptr + segment * 4 + 2), tl.load(segments_ptr + segment * 4 + 3)
    heads, i = tl.num_programs(1), tl.arange(0, C)[:, None]
    keys, values = tl.arange(0, K)[None, :], block * BV + tl.arange(0, BV)
    tile = values[:, None] * K + keys
    if IS_CUT:
        state = tl.load(entering_ptr + (segment * heads + h) * (V * K) + tile)
    else:
        state = tl.load(entering_ptr + (span * num_heads + head_first + h) * (V * K) + tile)
    leaving = after_ptr + (head_first + h) * (V * K) + tile
    for step in range(count):
        c = (first + step).to(tl.int64)
        place = c * heads + h
        at = place * (C * K) + i * K + keys
        columns = tl.trans(state)
        u = tl.load(u_ptr + place * (C * V) + i * V + values[None, :]).to(tl.float32)
        fixed = u - product(tl.load(w_ptr + at), columns, KIND)
        a = tl.load(a_ptr + place * (C * C) + i * C + tl.arange(0, C)[None, :])
        o = product(tl.load(q_in_ptr + at), columns, KIND) + product(a, fixed, KIND)
        gamma = tl.load(gamma_ptr + place * K + keys)
        state = state * gamma + product(tl.trans(fixed), tl.load(k_out_ptr + at), KIND)
        token, length = tl.load(chunks_ptr + c * 3).to(tl.int64), tl.load(chunks_ptr + c * 3 + 1)
        rows = out_ptr + ((token + i) * num_heads + head_first + h) * V + values[None, :]
        tl.store(rows, o.to(out_ptr.dtype.element_ty), mask=i < length)
        border = tl.load(chunks_ptr + c * 3 + 2).to(tl.int64)
        if border >= 0:
            tl.store(leaving + (num_spans + border) * num_heads * (V * K), state)
    if is_last != 0:
        tl.store(leaving + span * num_heads * (V * K), state)


@triton.jit
def fragment_kernel(
    w_ptr, u_ptr, k_out_ptr, gamma_ptr, segments_ptr, fragments_ptr, fragment_ptr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Grid (fragments, heads of the group, (V + K) / BV). fragment [segments, heads, V + K, K]: S~, then M."""
    h, block = tl.program_id(1), tl.program_id(2)
    segment = tl.load(fragments_ptr + tl.program_id(0)).to(tl.int64)
    first, count = tl.load(segments_ptr + segment * 4 + 1), tl.load(segments_ptr + segment * 4 + 2)
    heads, i, keys = tl.num_programs(1), tl.arange(0, C)[:, None], tl.arange(0, K)[None, :]
    rows = block * BV + tl.arange(0, BV)
    has_values = rows < V
    # rows past V are the identity's, which no u reaches
    state = tl.where((rows - V)[:, None] == keys, 1.0, 0.0)
    for step in range(count):
        place = (first + step).to(tl.int64) * heads + h
        at = place * (C * K) + i * K + keys
        u = tl.load(u_ptr + place * (C * V) + i * V + rows[None, :], mask=has_values[None, :], other=0.0)
        fixed = u.to(tl.float32) - product(tl.load(w_ptr + at), tl.trans(state), KIND)
        gamma = tl.load(gamma_ptr + place * K + keys)
        state = state * gamma + product(tl.trans(fixed), tl.load(k_out_ptr + at), KIND)
    tl.store(fragment_ptr + (segment * heads + h) * ((V + K) * K) + rows[:, None] * K + keys, state)


@triton.jit
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
