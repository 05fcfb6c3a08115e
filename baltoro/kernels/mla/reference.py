"""Latent attention in plain torch: expanded over full keys and values, absorbed over the paged latent cache.

No position information of any kind (NoPE). Softmax in the accumulate dtype.
Source: spec/k3.md 3.5, spec/kernels.md C.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.spans import Spans

QUERIES_AT_ONCE = 256


def attend(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, scale: float, out_dtype: torch.dtype) -> Tensor:
    """Causal attention of packed spans, each over its own keys.

    q [T, H, Dq]; k [S, H, Dq], v [S, H, Dv]: spans.ends[n] rows of span n, packed in span order. The last query of a
    span sees all its keys, the one before all but one, and so on. Returns [T, H, Dv] in `out_dtype`.
    """
    if q.shape[0] != spans.num_tokens or k.shape[0] != sum(spans.ends) or v.shape[0] != k.shape[0]:
        raise ShapeError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} for spans {spans.lengths}")
    ends, outputs = list(spans.ends), []
    parts = zip(torch.split(q, list(spans.lengths)), torch.split(k, ends), torch.split(v, ends), strict=True)
    for queries, keys, values in parts:
        seen = len(keys) - len(queries)
        for tile in torch.split(queries, QUERIES_AT_ONCE):  # bounds the scores, and skips keys that no query sees
            seen += len(tile)
            outputs.append(_attend_one(tile, keys[:seen], values[:seen], scale))
    return torch.cat(outputs).to(out_dtype)


def _attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [Q, H, Dq], k [S, H, Dq], v [S, H, Dv] -> [Q, H, Dv] in the accumulate dtype."""
    acc = acc_dtype(q.dtype)
    num_queries, num_keys = q.shape[0], k.shape[0]
    scores = q.to(acc).transpose(0, 1) @ k.to(acc).permute(1, 2, 0) * scale
    is_later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).triu(num_keys - num_queries + 1)
    share = torch.softmax(scores.masked_fill(is_later, float("-inf")), dim=-1)
    return (share @ v.to(acc).transpose(0, 1)).transpose(0, 1)


def attend_absorbed(
    q: Tensor, kv: Tensor, page_table: Tensor, lengths: Tensor, *, latent: int, scale: float
) -> tuple[Tensor, Tensor]:
    """One query per request over its pages of the latent cache; the value is the latent part of the key row.

    q [N, H, R+Dr] (absorbed query | shared part); kv [P, page, R+Dr]; page_table [N, Pmax]; lengths [N] keys in use;
    latent = R. Returns out [N, H, R] and the log-sum-exp of the scaled scores [N, H], both in the accumulate dtype.
    Rows past the length never matter, even if they hold NaN; length 0 gives out 0 and -inf.
    A window of query tokens, q [N, W, H, R+Dr], gives out [N, W, H, R] and [N, W, H]: `lengths` counts the keys that
    its last token sees, the one before sees one less, and so on, down to none.
    """
    if q.dim() == 4:
        return by_token(attend_absorbed, q, kv, page_table, lengths, latent=latent, scale=scale)
    acc = acc_dtype(q.dtype)
    rows = kv[page_table].flatten(1, 2)  # [N, Pmax * page, R+Dr]
    is_used = torch.arange(rows.shape[1], device=q.device) < lengths.to(q.device).unsqueeze(-1)
    rows = rows.masked_fill(~is_used.unsqueeze(-1), 0).to(acc)
    scores = (q.to(acc) @ rows.transpose(1, 2)) * scale
    scores = scores.masked_fill(~is_used.unsqueeze(1), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    share = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1))
    return share @ rows[..., :latent], lse


def by_token(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    latent: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """A window through a form that knows none: each of its tokens is a request of its own with fewer keys."""
    window = q.shape[1]
    before = torch.arange(window - 1, -1, -1, device=q.device)
    seen = (lengths.unsqueeze(1) - before).clamp_min(0).flatten()
    table = page_table.repeat_interleave(window, 0)
    out, lse = attend(q.flatten(0, 1), kv, table, seen, latent=latent, scale=scale)
    return out.view(-1, window, *out.shape[1:]), lse.view(-1, window, *lse.shape[1:])
