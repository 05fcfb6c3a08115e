"""What stands before and behind latent attention in decode, in plain torch: two operations beside the attention itself.

`enter`   the token's row is normed and written to the cache; kv_b's key part goes into the query
`leave`   kv_b's value part comes out of the latent result, times the sigmoid of the output gate

Rounding: as the operations one by one in the activation dtype; kernels keep fp32 in between and round once.
Source: spec/k3.md 3.5, spec/kernels.md C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.norm.reference import rms_norm
from baltoro.kernels.paged.reference import scatter_rows


def enter(
    q: Tensor,
    row: Tensor,
    gain: Tensor,
    eps: float,
    kv_b: Tensor,
    kv: Tensor,
    places: tuple[Tensor, Tensor],
) -> Tensor:
    """q [N, H, K+Dr] and row [N, R+Dr], as projected; gain [R]; kv_b [H, K+V, R]; kv [P, page, R+Dr] is written at
    places (page, offset) int64 [N]. Returns the query against the cache's rows, [N, H, R+Dr]."""
    rank = kv_b.shape[2]
    latent, shared = row[:, :rank], row[:, rank:]
    scatter_rows(kv, places, rms_norm(latent, gain, eps), shared)
    keys = q.shape[2] - shared.shape[1]
    # [H, N, K] x [H, K, R]: one small product per head
    absorbed = torch.bmm(q[..., :keys].transpose(0, 1), kv_b[:, :keys]).transpose(0, 1)
    return torch.cat([absorbed, q[..., keys:]], dim=-1)


def leave(out: Tensor, kv_b: Tensor, values: int, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
    """out [N, H, R]; kv_b [H, K+V, R], V = `values`; gate [N, H*V] before its sigmoid. Returns [N, H*V] in `dtype`."""
    up = kv_b[:, kv_b.shape[1] - values :]
    value = torch.bmm(out.to(dtype).transpose(0, 1), up.transpose(1, 2)).transpose(0, 1).flatten(1)
    return value if gate is None else (value * torch.sigmoid(gate).to(value.dtype)).to(dtype)
