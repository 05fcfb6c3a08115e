"""Kernel bodies of `packed`. Importing this needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(at, key, last, width: tl.constexpr, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr, INTERPRET: tl.constexpr):
    """Rows `key` of a tensor, `width` values each, zeros behind row `last` unless all are there."""
    d = tl.arange(0, BLOCK)
    if IS_WHOLE and width == BLOCK:
        value = tl.load(at[:, None] + d[None, :])
    else:
        value = tl.load(at[:, None] + d[None, :], mask=(key < last)[:, None] & (d < width)[None, :], other=0.0)
    return value.to(tl.float32) if INTERPRET else value  # the interpreter multiplies the bit patterns of bf16


@triton.jit
def step(
    q, q_shared, e_at, s_at, start, last, sees, best, total, acc, scale2, e_row, s_row,
    K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, KEYS: tl.constexpr, IS_WHOLE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of keys: all queries see all of it (IS_WHOLE), or query i the keys before sees[i]."""
    key = start + tl.arange(0, KEYS)
    e_rows = e_at + key.to(tl.int64) * e_row
    own = tile_of(e_rows, key, last, K, BLOCK_K, IS_WHOLE, INTERPRET)
    common = tile_of(s_at + key.to(tl.int64) * s_row, key, last, D, BLOCK_D, IS_WHOLE, INTERPRET)
    value = tile_of(e_rows + K, key, last, V, BLOCK_V, IS_WHOLE, INTERPRET)
    score = tl.dot(q, tl.trans(own))
    score = tl.dot(q_shared, tl.trans(common), score) * scale2
    if not IS_WHOLE:
        score = tl.where(key[None, :] < sees[:, None], score, float("-inf"))
    higher = tl.maximum(best, tl.max(score, 1))
    share = tl.exp2(score - higher[:, None])
    keep = tl.exp2(best - higher)
    total = total * keep + tl.sum(share, 1)
    share = share.to(tl.bfloat16)
    if INTERPRET:
        share = share.to(tl.float32)
    return higher, total, tl.dot(share, value, acc * keep[:, None])


@triton.jit
def attend_kernel(
    q, expanded, shared, out, blocks, num_blocks, scale2, q_row, q_head, e_row, e_head, s_row, heads,
    K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, head); out [T, heads, V]. blocks int64 [4, num_blocks], as `packed._blocks` says."""
    block, head = tl.program_id(0), tl.program_id(1)
    first, rows = tl.load(blocks + block), tl.load(blocks + num_blocks + block)
    first_key = tl.load(blocks + 2 * num_blocks + block)
    seen = tl.load(blocks + 3 * num_blocks + block).to(tl.int32)  # by the first query; each next one sees one more
    i = tl.arange(0, ROWS)
    last, sees = seen + rows.to(tl.int32) - 1, tl.minimum(seen + i, seen + rows.to(tl.int32) - 1)
    q_at = q + (first + i) * q_row + head * q_head
    queries = tile_of(q_at, i, rows, K, BLOCK_K, False, INTERPRET)
    q_shared = tile_of(q_at + K, i, rows, D, BLOCK_D, False, INTERPRET)
    e_at, s_at = expanded + first_key * e_row + head * e_head, shared + first_key * s_row
    best, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    whole = seen // KEYS * KEYS
    for start in tl.range(0, whole, KEYS, num_stages=STAGES):
        best, total, acc = step(
            queries, q_shared, e_at, s_at, start, last, sees, best, total, acc, scale2, e_row, s_row,
            K, D, V, BLOCK_K, BLOCK_D, BLOCK_V, KEYS, True, INTERPRET,
        )  # fmt: skip
    for start in tl.range(whole, last, KEYS, num_stages=1):
        best, total, acc = step(
            queries, q_shared, e_at, s_at, start, last, sees, best, total, acc, scale2, e_row, s_row,
            K, D, V, BLOCK_K, BLOCK_D, BLOCK_V, KEYS, False, INTERPRET,
        )  # fmt: skip
    v = tl.arange(0, BLOCK_V)
    at = out + ((first + i) * heads + head)[:, None] * V + v[None, :]
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=(i < rows)[:, None] & (v < V)[None, :])
