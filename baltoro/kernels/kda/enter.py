"""What a KDA layer computes between its projections and the chunk form, for prefill and training, in plain torch.

    short convolution and SiLU over q | k | v  ->  L2 norm of q and k;  log-decay;  beta

The composition of the operations' own forms: the oracle of the kernel, and where gradients come from.
Source: spec/k3.md 3.4 steps 2, 4, 6 and 7.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.conv.reference import short_conv
from baltoro.kernels.kda.fused_reference import MixerWeights, split_heads
from baltoro.kernels.kda.gate import log_decay
from baltoro.kernels.norm.reference import l2_norm
from baltoro.kernels.spans import Borders, Spans

L2_EPS = 1e-6


class Mixed(NamedTuple):
    """Arguments of `kda_chunk`: q, k [T, H, K] and v [T, H, V] in the activation dtype; decay [T, H, K] and beta [T, H]
    in the accumulate dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


def enter(
    x: Tensor,
    raw: Tensor,
    b: Tensor,
    weights: MixerWeights,
    *,
    spans: Spans,
    history: Tensor | None,
    borders: Borders = (),
) -> tuple[Mixed, Tensor]:
    """Packed spans.

    x [T, 2HK + HV] projections; raw [T, H, K] gate before bias; b [T, H] logits of beta; history [N, W-1, 2HK + HV] or
    None (zeros), not written. Returns what `kda_chunk` takes, and the histories of `conv.reference.short_conv`
    [N + B, W-1, 2HK + HV] in x.dtype: after each span, then at each of the B borders.
    """
    check(x, raw, b, weights)
    mixed, after = short_conv(x, weights.conv, spans=spans, history=history, borders=borders)
    q, k, v = split_heads(mixed, *raw.shape[1:])
    decay = log_decay(raw, weights.A_log, weights.dt_bias, lower_bound=weights.lower_bound)
    beta = torch.sigmoid(b.to(decay.dtype))
    # as wide as v: what is wider the matrix units would take in parts, for digits that v has not
    q, k = (l2_norm(part, L2_EPS).to(v.dtype) for part in (q, k))
    return Mixed(q, k, v, decay, beta), after


def check(x: Tensor, raw: Tensor, b: Tensor, weights: MixerWeights) -> None:
    """Errors: ShapeError if the arguments of `enter` do not fit each other."""
    num, heads, keys = raw.shape
    is_good = x.shape[0] == num and b.shape == (num, heads) and x.shape[1] == len(weights.conv)
    if not is_good or x.shape[1] <= 2 * heads * keys or x.shape[1] % heads:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, raw, b, weights.conv))
        raise ShapeError(f"x, raw, b, weight {shapes}")
