"""Triton kernels before and behind latent attention. 64-bit offsets into the cache. Importing this needs triton.

PDL: a program loads its weights while the kernel in front still runs, waits for it and lets the next one start.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def enter_kernel(
    q, row, gain, kv_b, kv, pages, offsets, query, num, eps, q_token, q_head, row_token, kv_page, kv_row,
    H: tl.constexpr, K: tl.constexpr, BOTH: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (columns of the latent, head, tokens): its part of the query; the last of each head copies the shared
    part and norms and writes every H-th token's row of the cache."""
    block, head = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * ROWS
    token = first + tl.arange(0, ROWS)
    is_token = (token < num)[:, None]
    q_at = q + token[:, None].to(tl.int64) * q_token + head * q_head
    out_at = query + (token[:, None].to(tl.int64) * H + head) * (R + S)
    if block < tl.num_programs(0) - 1:
        k, column = tl.arange(0, BLOCK_K), block * COLUMNS + tl.arange(0, COLUMNS)
        is_column = (column < R)[None, :]
        weight = tl.load(
            kv_b + (head * BOTH + k[:, None]) * R + column[None, :], mask=(k < K)[:, None] & is_column, other=0.0
        )
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        x = tl.load(q_at + k[None, :], mask=is_token & (k < K)[None, :], other=0.0)
        if INTERPRET:  # the interpreter multiplies the bit patterns of bf16
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        product = tl.dot(x, weight, input_precision="ieee")
        tl.store(out_at + column[None, :], product.to(query.dtype.element_ty), mask=is_token & is_column)
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        s = tl.arange(0, BLOCK_S)
        is_shared = is_token & (s < S)[None, :]
        tl.store(out_at + R + s[None, :], tl.load(q_at + K + s[None, :], mask=is_shared, other=0.0), mask=is_shared)
        r = tl.arange(0, BLOCK_R)
        factor = tl.load(gain + r, mask=r < R, other=0.0).to(kv.dtype.element_ty).to(tl.float32)
        for place_of in range(first + head, tl.minimum(first + ROWS, num), H):
            n = place_of + tl.zeros([], tl.int64)  # the interpreter counts in Python's numbers
            at = row + n * row_token
            wide = tl.load(at + r, mask=r < R, other=0.0).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / R + eps)
            normed = (wide * inverse).to(kv.dtype.element_ty).to(tl.float32) * factor
            place = kv + tl.load(pages + n).to(tl.int64) * kv_page + tl.load(offsets + n).to(tl.int64) * kv_row
            tl.store(place + r, normed.to(kv.dtype.element_ty), mask=r < R)
            tl.store(place + R + s, tl.load(at + R + s, mask=s < S, other=0.0).to(kv.dtype.element_ty), mask=s < S)


@triton.jit
def leave_kernel(
    out, kv_b, gate, result, num, gate_token,
    H: tl.constexpr, V: tl.constexpr, BOTH: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (values, head, tokens): values of a head from its latent result, times the sigmoid of the gate."""
    value, head = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    token, r = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_R)
    is_value, is_token = value < V, (token < num)[:, None]
    weight = tl.load(
        kv_b + (head * BOTH + BOTH - V + value[:, None]) * R + r[None, :],
        mask=is_value[:, None] & (r < R)[None, :],
        other=0.0,
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = (token[:, None].to(tl.int64) * H + head) * R + r[None, :]
    x = tl.load(out + at, mask=is_token & (r < R)[None, :], other=0.0).to(weight.dtype)
    if INTERPRET:
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    product = tl.dot(x, tl.trans(weight), input_precision="ieee")
    both = is_token & is_value[None, :]
    place = head * V + value[None, :]
    if HAS_GATE:
        bent = tl.load(gate + token[:, None].to(tl.int64) * gate_token + place, mask=both, other=0.0).to(tl.float32)
        product = product * tl.sigmoid(bent)
    tl.store(result + token[:, None].to(tl.int64) * (H * V) + place, product.to(result.dtype.element_ty), mask=both)
