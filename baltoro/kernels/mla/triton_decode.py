"""Triton kernels of absorbed attention over paged latent rows: one split of the keys, and the merge of the splits.

A query row is one (window token, head) of a request; all rows of a request read the same key rows (MQA), the value is
the latent part of the key row, so a tile is loaded once for both products. Scores live in log2 units inside.
In and out: see `split_decode.py`, which launches them. Importing this needs triton.
Source: spec/kernels.md C.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, INTERP: tl.constexpr):
    """a @ b summed in FP32; Triton's interpreter multiplies bf16 bit patterns, so it gets FP32."""
    if INTERP:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def split_kernel(
    q, kv, table, lengths, out, lse, scale2,
    q_request, q_row, kv_page, kv_row, table_request,
    heads, num_rows, window, page_size,
    R: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Program (request, split, block of rows). Writes out [N, SPLITS, rows, R] and lse [N, SPLITS, rows], FP32.

    A split without keys for a row writes out 0 and lse -inf there.
    """
    request = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    r, d, n = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D), tl.arange(0, KEYS)
    length = tl.load(lengths + request).to(tl.int32)
    sees = length - (window - 1 - row // heads)  # keys this row sees: causal inside the window
    tiles = tl.cdiv(length, KEYS)
    per_split = tl.cdiv(tiles, SPLITS)
    first = split * per_split * KEYS
    last = tl.minimum(length, first + per_split * KEYS)

    is_row = (row < num_rows)[:, None]
    at = q + request * q_request + row[:, None] * q_row
    q_latent = tl.load(at + r[None, :], mask=is_row & (r < R)[None, :], other=0)
    q_shared = tl.load(at + R + d[None, :], mask=is_row & (d < D)[None, :], other=0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_R], tl.float32)
    for start in range(first, last, KEYS):
        place = start + n
        is_key = place < last
        page = tl.load(table + request * table_request + place // page_size, mask=is_key, other=0).to(tl.int64)
        key = kv + page * kv_page + (place % page_size).to(tl.int64) * kv_row
        latent = tl.load(key[:, None] + r[None, :], mask=is_key[:, None] & (r < R)[None, :], other=0)
        shared = tl.load(key[:, None] + R + d[None, :], mask=is_key[:, None] & (d < D)[None, :], other=0)
        score = dot(q_latent, tl.trans(latent), INTERP) + dot(q_shared, tl.trans(shared), INTERP)
        is_seen = is_key[None, :] & (place[None, :] < sees[:, None])
        score = tl.where(is_seen, score * scale2, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(score - base[:, None])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(share, axis=1)
        if INTERP:
            acc = acc * keep[:, None] + tl.dot(share, latent.to(tl.float32), input_precision="ieee")
        else:
            acc = acc * keep[:, None] + tl.dot(share.to(latent.dtype), latent, input_precision="ieee")
        best = higher
    is_empty = total == 0
    acc = acc / tl.where(is_empty, 1.0, total)[:, None]
    sums = tl.where(is_empty, float("-inf"), (best + tl.log2(tl.where(is_empty, 1.0, total))) * 0.6931471805599453)
    place = (request * SPLITS + split) * num_rows + row
    tl.store(lse + place, sums, mask=row < num_rows)
    tl.store(out + place[:, None] * R + r[None, :], acc, mask=is_row & (r < R)[None, :])


@triton.jit
def merge_kernel(
    parts, sums, out, lse, num_rows, R: tl.constexpr, BLOCK_R: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Program (request, row): out = sum_s e^(lse_s - lse) part_s; -inf everywhere gives 0 and -inf."""
    request, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, r = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_R)
    every = tl.load(sums + (request * SPLITS + s) * num_rows + row, mask=s < SPLITS, other=float("-inf"))
    best = tl.max(every, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp(every - base), axis=0)
    acc = tl.zeros([BLOCK_R], tl.float32)
    for split in range(SPLITS):
        place = (request * SPLITS + split) * num_rows + row
        weight = tl.exp(tl.load(sums + place) - base)
        acc += weight * tl.load(parts + place * R + r, mask=r < R, other=0)
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    place = request * num_rows + row
    tl.store(lse + place, tl.where(is_empty, float("-inf"), base + tl.log(total)))
    tl.store(out + place * R + r, acc / total, mask=r < R)
