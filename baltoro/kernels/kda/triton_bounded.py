# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The preparation of the KDA chunk form where gates are bounded (>= -5), in fewer and wider steps.

`triton_prepare` waits in each of its 38 products for stores, a barrier and the product itself: no unit is busy for a
fifth of the time. Here are 18, six of which need no other warp. Half a chunk, 32 tokens, takes its decays from its
middle: factors within e^-80 .. e^80, which bf16 holds. The columns of all pairs lie below each other, [2 C, K]: all
keys from the middles of their halves, then the first half's once more from the middle of the second. So keys and
queries, decayed once, each have one product with them; what it has beside pairs may overflow and is masked.
Launched by `prefill`; needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baltoro.kernels.kda.triton_prepare import corners, invert_unit_lower, load_rows, product

LINE = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@triton.jit
def decays(table, which, g, R: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr):
    """2 to the sums of g [C, BLOCK] over rows, R of them from row `which` C of the table [5 C, C]."""
    i, j = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    return tl.exp2(product(tl.load(table + (which * C + i) * C + j), g, KIND))


@triton.jit
def fetch(start, row, length, C: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr):
    """Have the chunk's rows of up to 128 bf16 brought into the L2 cache, 128 bytes at a time."""
    if KIND == "fp16":  # the interpreter, which has no assembly, sums in FP32
        i, place = tl.arange(0, C)[:, None], tl.arange(0, 2)[None, :] * 64
        at = start + tl.minimum(i, length - 1) * row + tl.where(place < SIZE, place, 0)
        tl.inline_asm_elementwise(LINE, "=r,l", [at.to(tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def rounded(factor, KIND: tl.constexpr):
    """As `product` would round it."""
    if KIND == "bf16":
        factor = factor.to(tl.bfloat16)
    return factor


@triton.jit
def pairs(found, C: tl.constexpr, HAS_SELF: tl.constexpr):
    """[C, C] of products with all columns [C, 2 C]: pairs of a row and an earlier column, or itself."""
    i, c, half = tl.arange(0, C)[:, None], tl.arange(0, 2 * C)[None, :], C // 2
    j = c % C
    is_within = (c < C) & (i // half == j // half) & ((i >= j) if HAS_SELF else (i > j))
    is_across = (c >= C) & (i >= half) & (j < half)
    return tl.sum(tl.reshape(tl.where(is_within | is_across, found, 0.0), [C, 2, C]), axis=1)


@triton.jit
def invert_by_blocks(lower, C: tl.constexpr, KIND: tl.constexpr):
    """As in `triton_prepare`; up to 16 tokens by blocks [C / 16, 16, 16] of the diagonal, each of which a warp has."""
    N: tl.constexpr = C // 16
    is_diagonal = (tl.arange(0, N)[:, None] == tl.arange(0, N)[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(is_diagonal, tl.reshape(lower, [N, 16, N, 16]), 0.0), axis=2)
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    small = tl.where(i == j, 1.0, 0.0)[None] - tl.where(corners(16, 1)[None], blocks, 0.0)
    for level in tl.static_range(1, 4):
        below = tl.where(corners(16, 1 << level)[None], blocks, 0.0)
        small -= product(small, product(below, small, KIND), KIND)
    inverse = tl.reshape(tl.where(is_diagonal, small[:, :, None, :], 0.0), [C, C])
    for level in tl.static_range(4, 6):
        if (1 << level) < C:
            below = tl.where(corners(C, 1 << level), lower, 0.0)
            inverse -= product(inverse, product(below, inverse, KIND), KIND)
    return inverse


@triton.jit(do_not_specialize=["beta_row", "head_first"])
def bounded_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, table_ptr, chunks_ptr, w_ptr, u_ptr, k_out_ptr, q_in_ptr, a_ptr, gamma_ptr,
    q_row, k_row, v_row, g_row, beta_row, head_first, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    INVERSE_KIND: tl.constexpr, SUMS: tl.constexpr, IS_DIRECT: tl.constexpr, HAS_BLOCKS: tl.constexpr,
):  # fmt: skip
    """As `triton_prepare.prepare_kernel`, of chunks of 32 or 64 tokens. Table: `launch.bounded_matrices`."""
    c, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, place = h + head_first, c * tl.num_programs(1) + h
    first, length = tl.load(chunks_ptr + c * 3).to(tl.int64), tl.load(chunks_ptr + c * 3 + 1)
    q_ptr, k_ptr = q_ptr + first * q_row + head * K, k_ptr + first * k_row + head * K
    v_ptr, g_ptr = v_ptr + first * v_row + head * V, g_ptr + first * g_row + head * K
    w_ptr, k_out_ptr, q_in_ptr = w_ptr + place * (C * K), k_out_ptr + place * (C * K), q_in_ptr + place * (C * K)
    beta_ptr, square = beta_ptr + first * beta_row + head, place * (C * C)
    i, column, block = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, BLOCK)[None, :]
    token, is_live = tl.arange(0, 2 * C)[:, None] % C, i < length
    fetch(q_ptr, q_row, length, C, K, SUMS)
    if not IS_DIRECT:
        fetch(v_ptr, v_row, length, C, V, SUMS)
    keys, queries = tl.zeros([C, 2 * C], tl.float32), tl.zeros([C, 2 * C], tl.float32)
    g = tl.zeros([C, BLOCK], tl.float32)
    # unrolled: a loop would leave products of register operands without a wait at its end
    for part in tl.static_range(K // BLOCK):
        key = part * BLOCK + block
        g = load_rows(g_ptr + (i * g_row + key), is_live) * 1.4426950408889634
        columns = load_rows(k_ptr + (token * k_row + key), token < length)
        tl.store(gamma_ptr + place * K + key, tl.exp2(tl.sum(g, axis=0)[None, :]))
        columns *= decays(table_ptr, 3, g, 2 * C, C, SUMS)
        columns = tl.trans(rounded(columns, KIND))
        # columns go to shared memory before rows are read, which would fill the registers meanwhile
        tl.debug_barrier()
        decay = decays(table_ptr, 2, g, C, C, SUMS)
        keys += product(load_rows(k_ptr + (i * k_row + key), is_live) * decay, columns, KIND)
        queries += product(load_rows(q_ptr + (i * q_row + key), is_live) * decay, columns, KIND)
    tl.store(a_ptr + square + (i * C + column), (pairs(queries, C, True) * scale).to(a_ptr.dtype.element_ty))
    # times beta of its columns, so that values go into their product as they are
    lower = pairs(keys, C, False) * load_rows(beta_ptr + i * beta_row, is_live)
    solved = invert_by_blocks(lower, C, INVERSE_KIND) if HAS_BLOCKS else invert_unit_lower(lower, C, INVERSE_KIND)
    solved *= load_rows(beta_ptr + column * beta_row, column < length)
    for part in tl.static_range(K // BLOCK):
        key = part * BLOCK + block
        at = i * K + key
        if BLOCK < K:
            g = load_rows(g_ptr + (i * g_row + key), is_live) * 1.4426950408889634
        prefix = decays(table_ptr, 1, g, C, C, SUMS)
        entering = load_rows(k_ptr + (i * k_row + key), is_live) * prefix
        if not IS_DIRECT:
            entering = product(solved, entering, KIND)
        tl.store(w_ptr + at, entering.to(w_ptr.dtype.element_ty))
        q_in = load_rows(q_ptr + (i * q_row + key), is_live) * prefix * scale
        tl.store(q_in_ptr + at, q_in.to(q_in_ptr.dtype.element_ty))
        k_out = load_rows(k_ptr + (i * k_row + key), is_live) * decays(table_ptr, 0, g, C, C, SUMS)
        tl.store(k_out_ptr + at, k_out.to(k_out_ptr.dtype.element_ty))
    if IS_DIRECT:
        tl.store(u_ptr + square + (i * C + column), solved.to(u_ptr.dtype.element_ty))
    else:
        for part in tl.static_range(V // BLOCK):
            value = part * BLOCK + block
            u = product(solved, tl.load(v_ptr + (i * v_row + value), mask=is_live, other=0.0), KIND)
            tl.store(u_ptr + place * (C * V) + (i * V + value), u.to(u_ptr.dtype.element_ty))
