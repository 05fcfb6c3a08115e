# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""First Triton kernel of the KDA chunk form: A_qk, w, u, k R, q P and P_C of every chunk, from its tokens alone.

Decays between pairs are never quotients: a chunk is halved down to single tokens, each half taking its decay from the
border between them, so every factor is at most 1 and any gate works. A bounded gate (>= -5) stops at FIRST = 16
tokens, whose factors around their middle lie within e^-40 .. e^40: half the products.
Sums of g over rows are products with a matrix of zeros and ones: no scan, no three dimensions, and nothing is
subtracted that was added before. One sum a level serves both halves, and so does one decayed tile of keys: its second
half are the rows, its first half the columns. Launched by `prefill`; needs triton. Source: spec/kernels.md A.3, A.4.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, KIND: tl.constexpr):
    """a b with FP32 sums. KIND: "bf16" and "fp16" round the factors; else the input precision of an FP32 product."""
    if KIND == "bf16":
        out = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif KIND == "fp16":
        out = tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=KIND)
    return out


@triton.jit
def load_rows(at, mask):
    """FP32 of masked rows."""
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_gates(at, mask):
    """As `load_rows`, in units of log 2. What FP16 could not hold, or no sum could take (0 times infinity), decays to 0
    in any case."""
    return tl.maximum(load_rows(at, mask) * 1.4426950408889634, -10000.0)


@triton.jit
def sums(table, which, g, C: tl.constexpr, KIND: tl.constexpr):
    """The sums of g [C, BK] over rows that matrix `which` of the table takes; see `launch.sum_matrices`."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return product(tl.load(table + which * (C * C) + i * C + j), g, KIND)


@triton.jit
def corners(C: tl.constexpr, HALF: tl.constexpr):
    """bool [C, C]: row in the second, column in the first half of the same 2 HALF tokens."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return (i // (2 * HALF) == j // (2 * HALF)) & (i // HALF > j // HALF)


@triton.jit
def add_pairs_within(
    a_kk, a_qk, q_at, k_at, g, table, is_live, C: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Pairs within groups of FIRST tokens, 1 or 16."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    q, k = load_rows(q_at, is_live), load_rows(k_at, is_live)
    if FIRST == 1:
        a_qk += tl.where(i == j, tl.sum(q * k, axis=1)[:, None], 0.0)
    else:
        # any reference would do for a group; its middle keeps both factors small
        middle = sums(table, 2, g, C, SUMS)
        to_row, columns = tl.exp2(middle), tl.trans(k * tl.exp2(-middle))
        is_group = i // FIRST == j // FIRST
        a_kk += tl.where(is_group & (i > j), product(k * to_row, columns, KIND), 0.0)
        a_qk += tl.where(is_group & (i >= j), product(q * to_row, columns, KIND), 0.0)
    return a_kk, a_qk


@triton.jit
def add_pairs(
    a_kk, a_qk, q_at, k_at, g, table, is_live, C: tl.constexpr, FIRST: tl.constexpr, KIND: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """A_kk without beta (strictly lower) and A_qk without scale (diagonal included), [C, C]: adds some channels' part.

    Rows are read again at every level, out of the cache: held in registers over all of them they would spill. The
    barriers keep the reads apart.
    """
    a_kk, a_qk = add_pairs_within(a_kk, a_qk, q_at, k_at, g, table, is_live, C, FIRST, KIND, SUMS)
    for level in tl.static_range(7):
        if (FIRST << level) < C:
            tl.debug_barrier()
            decay = tl.exp2(sums(table, 3 + level, g, C, SUMS))
            keys, is_pair = load_rows(k_at, is_live) * decay, corners(C, FIRST << level)
            columns = tl.trans(keys)
            a_kk += tl.where(is_pair, product(keys, columns, KIND), 0.0)
            a_qk += tl.where(is_pair, product(load_rows(q_at, is_live) * decay, columns, KIND), 0.0)
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


@triton.jit(do_not_specialize=["beta_row", "head_first"])
def prepare_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, table_ptr, chunks_ptr, w_ptr, u_ptr, k_out_ptr, q_in_ptr, a_ptr, gamma_ptr,
    q_row, k_row, v_row, g_row, beta_row, head_first, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
    KIND: tl.constexpr, INVERSE_KIND: tl.constexpr, SUMS: tl.constexpr, IS_DIRECT: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, heads of the group). Rows past the chunk's tokens come out as zeros, which leave a state as it is.

    IS_DIRECT: in the places of w and u come k P and the inverse times beta, [C, K] and [C, C]; v is not read. Else it
    goes over the channels in blocks of BLOCK and, if there are several, reads keys and gates again for w.
    """
    c, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, place = h + head_first, c * tl.num_programs(1) + h
    first, length = tl.load(chunks_ptr + c * 3).to(tl.int64), tl.load(chunks_ptr + c * 3 + 1)
    i, block = tl.arange(0, C)[:, None], tl.arange(0, BLOCK)[None, :]
    is_live = i < length
    # scalar addresses of 64 bits, offsets from them of 32: half the registers
    q_ptr, k_ptr = q_ptr + first * q_row + head * K, k_ptr + first * k_row + head * K
    v_ptr, g_ptr = v_ptr + first * v_row + head * V, g_ptr + first * g_row + head * K
    w_ptr, k_out_ptr, q_in_ptr = w_ptr + place * (C * K), k_out_ptr + place * (C * K), q_in_ptr + place * (C * K)
    at = i * K + block
    beta = load_rows(beta_ptr + first * beta_row + head + i * beta_row, is_live)
    a_kk, a_qk = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    entering = tl.zeros([C, BLOCK], w_ptr.dtype.element_ty)
    for part in range(K // BLOCK):
        keys = part * BLOCK + block
        q_at, k_at = q_ptr + (i * q_row + keys), k_ptr + (i * k_row + keys)
        g = load_gates(g_ptr + (i * g_row + keys), is_live)
        tl.store(gamma_ptr + place * K + keys, tl.exp2(tl.sum(g, axis=0)[None, :]))
        k = load_rows(k_at, is_live)
        to_end = tl.exp2(sums(table_ptr, 1, g, C, SUMS))
        tl.store(k_out_ptr + (at + part * BLOCK), (k * to_end).to(k_out_ptr.dtype.element_ty))
        prefix = tl.exp2(sums(table_ptr, 0, g, C, SUMS))
        q = load_rows(q_at, is_live)
        tl.store(q_in_ptr + (at + part * BLOCK), (q * prefix * scale).to(q_in_ptr.dtype.element_ty))
        if IS_DIRECT:
            tl.store(w_ptr + (at + part * BLOCK), (k * prefix).to(w_ptr.dtype.element_ty))
        elif BLOCK == K:
            entering = (k * beta * prefix).to(w_ptr.dtype.element_ty)
        a_kk, a_qk = add_pairs(a_kk, a_qk, q_at, k_at, g, table_ptr, is_live, C, FIRST, KIND, SUMS)
    square = place * (C * C) + (i * C + tl.arange(0, C)[None, :])
    tl.store(a_ptr + square, (a_qk * scale).to(a_ptr.dtype.element_ty))
    inverse = invert_unit_lower(a_kk * beta, C, INVERSE_KIND)
    if IS_DIRECT:
        column = tl.arange(0, C)
        beta = load_rows(beta_ptr + first * beta_row + head + column * beta_row, column < length)
        tl.store(u_ptr + square, (inverse * beta[None, :]).to(u_ptr.dtype.element_ty))
    else:
        for part in range(K // BLOCK):
            if BLOCK < K:
                keys = part * BLOCK + block
                g = load_gates(g_ptr + (i * g_row + keys), is_live)
                prefix = tl.exp2(sums(table_ptr, 0, g, C, SUMS))
                entering = (load_rows(k_ptr + (i * k_row + keys), is_live) * beta * prefix).to(w_ptr.dtype.element_ty)
            tl.store(w_ptr + (at + part * BLOCK), product(inverse, entering, KIND).to(w_ptr.dtype.element_ty))
        for part in range(V // BLOCK):
            v = load_rows(v_ptr + (i * v_row + part * BLOCK + block), is_live)
            u = product(inverse, v * beta, KIND)
            tl.store(u_ptr + place * (C * V) + (i * V + part * BLOCK + block), u.to(u_ptr.dtype.element_ty))
