"""Triton kernels of absorbed attention over paged latent rows: one split of the keys, and the merge of the splits.

A query row is one (window token, head) of a request; all rows of a request read the same key rows (MQA), the value is
the latent part of the key row, so a tile is loaded once for both products. Both products have the tile on the left,
S^T = K Q^T and O^T = V^T P^T: 64 keys (512 channels) are the 64 rows that a warp group multiplies from shared memory,
and 12 heads are padded to 16 columns, not to 64 rows. Scores live in log2 units inside.
In and out: see `split_decode.py`, which launches them. Importing this needs triton.
Source: spec/kernels.md C.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def dot(a, b, acc, INTERP: tl.constexpr):
    """acc + a @ b summed in FP32; Triton's interpreter multiplies bf16 bit patterns, so it gets FP32."""
    if INTERP:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def page_of(pages, start, n, last, KEYS: tl.constexpr, PAGE: tl.constexpr):
    """The page number of a tile that lies inside one page, else of each of its keys."""
    if PAGE % KEYS == 0:
        page = tl.load(pages + start // PAGE, mask=start < last, other=0).to(tl.int64)
    else:
        page = tl.load(pages + (start + n) // PAGE, mask=start + n < last, other=0).to(tl.int64)
    return page


@triton.jit
def key_rows(kv, page, start, n, kv_page, KV_ROW: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr):
    """Where the rows of keys start + n lie. Their distance is a constant, so that most of an address is one too.

    Inside a page 32 bits are enough; from page to page, 64.
    """
    if PAGE == KEYS:
        rows = kv + page * kv_page + n * KV_ROW
    elif PAGE % KEYS == 0:
        rows = kv + page * kv_page + (start % PAGE) * KV_ROW + n * KV_ROW
    else:
        rows = kv + page * kv_page + (start + n) % PAGE * KV_ROW
    return rows


@triton.jit
def columns(rows, c, is_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[len(rows), BLOCK] values; a full width needs no mask along it."""
    if WIDTH == BLOCK:
        tile = tl.load(rows[:, None] + c[None, :], mask=is_row[:, None], other=0)
    else:
        tile = tl.load(rows[:, None] + c[None, :], mask=is_row[:, None] & (c < WIDTH)[None, :], other=0)
    return tile


@triton.jit
def products(q_latent, q_shared, latent, shared, FLIP: tl.constexpr, INTERP: tl.constexpr):
    """Keys times query rows, [KEYS, ROWS] either way.

    FLIP: the query rows are on the left in the product: where they are 64 and the keys are not, a warp group takes them
    from shared memory; where they are 16, the keys are divided among the warps and no product is made twice.
    """
    if FLIP:
        score = dot(q_latent, tl.trans(latent), tl.zeros([q_latent.shape[0], latent.shape[0]], tl.float32), INTERP)
        score = tl.trans(dot(q_shared, tl.trans(shared), score, INTERP))
    else:
        score = dot(latent, tl.trans(q_latent), tl.zeros([latent.shape[0], q_latent.shape[0]], tl.float32), INTERP)
        score = dot(shared, tl.trans(q_shared), score, INTERP)
    return score


@triton.jit
def finish(out, lse, place, is_row, best, total, acc, r, R: tl.constexpr, writes_out):
    """Divide by the sums of each row and write them; sums of 0 give 0 and -inf."""
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    tl.store(lse + place, tl.where(is_empty, float("-inf"), (best + tl.log2(total)) * 0.6931471805599453), mask=is_row)
    if writes_out:
        tl.store(out + place[None, :] * R + r[:, None], acc / total[None, :], mask=is_row[None, :] & (r < R)[:, None])


@triton.jit(do_not_specialize=["heads", "num_rows", "window", "splits"])
def split_kernel(
    q, kv, table, lengths, out, lse, scale2,
    q_request, q_row, kv_page, table_request,
    heads, num_rows, window, splits,
    KV_ROW: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    STAGES: tl.constexpr, FLIP: tl.constexpr,
    WRITES_EMPTY: tl.constexpr, PDL: tl.constexpr, INTERP: tl.constexpr,
):  # fmt: skip
    """Program (request, split, block of rows). Writes out [N, splits, rows, R] and lse [N, splits, rows], FP32.

    A split without keys writes lse -inf, and out only with WRITES_EMPTY; a row that sees no key gets out 0, lse -inf.
    PDL: it may start before the kernel in front of it has ended, and lets the next one start once that has.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    r, d, n = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D), tl.arange(0, KEYS)
    length = tl.load(lengths + request).to(tl.int32)
    sees = length - (window - 1 - row // heads)  # keys this row sees: causal inside the window
    per_split = tl.cdiv(tl.cdiv(length, KEYS), splits)
    first = split * per_split * KEYS
    last = tl.minimum(length, first + per_split * KEYS)
    pages = table + request * table_request
    is_row = row < num_rows
    at = q + request * q_request + row * q_row
    q_latent = columns(at, r, is_row, R, BLOCK_R)
    q_shared = columns(at + R, d, is_row, D, BLOCK_D)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([KEYS, ROWS], tl.float32)  # of each place in the tile: summed over the tile once, at the end
    acc = tl.zeros([BLOCK_R, ROWS], tl.float32)
    page = page_of(pages, first, n, last, KEYS, PAGE)
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        place = start + n
        is_key = place < last
        key = key_rows(kv, page, start, n, kv_page, KV_ROW, KEYS, PAGE)
        latent = columns(key, r, is_key, R, BLOCK_R)
        shared = columns(key + R, d, is_key, D, BLOCK_D)
        page = page_of(pages, start + KEYS, n, last, KEYS, PAGE)
        score = products(q_latent, q_shared, latent, shared, FLIP, INTERP)
        score = tl.where(is_key[:, None] & (place[:, None] < sees[None, :]), score * scale2, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(score - base[None, :])
        keep = tl.exp2(best - base)
        total = total * keep[None, :] + share
        acc = dot(tl.trans(latent), share if INTERP else share.to(latent.dtype), acc * keep[None, :], INTERP)
        best = higher
    place = (request * splits + split) * num_rows + row
    finish(out, lse, place, is_row, best, tl.sum(total, axis=0), acc, r, R, WRITES_EMPTY or first < last)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def merge_kernel(
    parts, sums, out, lse, num_rows, splits,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (request, row, block of channels): out = sum_s e^(lse_s - lse) part_s, all splits loaded at once.

    Parts of splits at -inf are not read: nobody wrote them. -inf everywhere gives 0 and -inf.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request, row, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    s, r = tl.arange(0, BLOCK_S), block * BLOCK_R + tl.arange(0, BLOCK_R)
    place = (request * splits + s) * num_rows + row
    every = tl.load(sums + place, mask=s < splits, other=float("-inf"))
    is_some = every > float("-inf")
    part = tl.load(parts + place[:, None] * R + r[None, :], mask=is_some[:, None] & (r < R)[None, :], other=0)
    best = tl.max(every, axis=0)
    base = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.exp(every - base)
    total = tl.sum(weight, axis=0)
    acc = tl.sum(weight[:, None] * part, axis=0)
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    place = request * num_rows + row
    if block == 0:
        tl.store(lse + place, tl.where(is_empty, float("-inf"), base + tl.log(total)))
    tl.store(out + place * R + r, acc / total, mask=r < R)
