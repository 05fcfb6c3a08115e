"""Short causal depthwise convolution with carried history, then SiLU, in plain torch.

    y[t, c] = SiLU( sum_j weight[c, j] * x[t - (W-1) + j, c] )

Inputs before a span come from its history, the last W-1 inputs of the same request (oldest first); without one they
are zeros. Products and sums in the accumulate dtype, the result in x.dtype. Source: spec/k3.md 3.4 step 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.spans import Spans


def short_conv(x: Tensor, weight: Tensor, *, spans: Spans, history: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve packed spans.

    x [T, C]; weight [C, W]; history [N, W-1, C] or None (zeros). Returns y [T, C] and the new history [N, W-1, C]:
    the last W-1 inputs of each request, old history included where the span is shorter. `history` is not written.
    """
    taps = weight.shape[-1]
    keep = taps - 1
    if x.shape[0] != spans.num_tokens or weight.shape[0] != x.shape[1]:
        raise ShapeError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} do not fit {spans.num_tokens} tokens")
    past = history.to(x.dtype) if history is not None else x.new_zeros(len(spans), keep, x.shape[1])
    pieces = [part for n, rows in enumerate(torch.split(x, list(spans.lengths))) for part in (past[n], rows)]
    padded = torch.cat(pieces)  # every span with its W-1 earlier inputs in front
    wide, weight = padded.to(acc_dtype(x.dtype)), weight.to(acc_dtype(x.dtype))
    num_out = padded.shape[0] - keep
    y = wide[:num_out] * weight[:, 0]
    for tap in range(1, taps):
        y = torch.addcmul(y, wide[tap : tap + num_out], weight[:, tap])
    ends = [offset + (n + 1) * keep for n, offset in enumerate(spans.offsets[1:])]
    if len(spans) > 1:  # drop the rows whose window mixes two spans
        y = torch.cat([y[end - keep - length : end - keep] for end, length in zip(ends, spans.lengths, strict=True)])
    new_history = torch.stack([padded[end - keep : end] for end in ends])
    return F.silu(y).to(x.dtype), new_history


def short_conv_step(x: Tensor, weight: Tensor, history: Tensor, slots: Tensor) -> Tensor:
    """One token per request: x [N, C], weight [C, W], history [U, W-1, C], slots [N] -> y [N, C].

    Writes history[slots] in place (drops the oldest input, appends x); other slots are untouched.
    """
    window = torch.cat([history[slots], x.to(history.dtype).unsqueeze(1)], dim=1)
    acc = acc_dtype(x.dtype)
    y = (window.to(acc) * weight.to(acc).T).sum(1)
    history[slots] = window[:, 1:]
    return F.silu(y).to(x.dtype)
