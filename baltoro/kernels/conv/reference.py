"""Short causal depthwise convolution with carried history, then SiLU, in plain torch.

    y[t, c] = SiLU( sum_j weight[c, j] * x[t - (W-1) + j, c] )

Inputs before a span come from its history, the last W-1 inputs of the same request (oldest first); without one they
are zeros. Products and sums in the accumulate dtype, the result in x.dtype. The gradient is written out: autograd would
make a full-size tensor per tap. Source: spec/k3.md 3.4 step 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from baltoro.errors import ShapeError
from baltoro.kernels.copies import to_device
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.spans import Borders, Spans


def short_conv(
    x: Tensor, weight: Tensor, *, spans: Spans, history: Tensor | None, borders: Borders = ()
) -> tuple[Tensor, Tensor]:
    """Convolve packed spans.

    x [T, C]; weight [C, W]; history [N, W-1, C] or None (zeros). Returns y [T, C] and new histories [N + B, W-1, C]:
    the last W-1 inputs after each span, then at each of the B borders (anywhere inside a span), old history included
    where fewer inputs came since. `history` is not written.
    """
    spans.check_borders(borders)
    if x.shape[0] != spans.num_tokens or weight.shape[0] != x.shape[1]:
        raise ShapeError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} do not fit {spans.num_tokens} tokens")
    history = None if history is None else history.to(x.dtype)
    y, after = _ShortConv.apply(x, weight, history, spans, borders)  # type: ignore[no-untyped-call]
    return y, after


class _ShortConv(torch.autograd.Function):
    """Works on the spans laid out one after the other, each with its W-1 earlier inputs in front ("padded").

    Output row i of that layout sees inputs i .. i+W-1; the W-1 rows whose window mixes two spans are dropped.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, history: Tensor | None, spans: Spans, borders: Borders
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        keep, acc = weight.shape[1] - 1, acc_dtype(x.dtype)
        layout = layout_of(spans, keep)
        padded = x.new_zeros(len(x) + len(spans) * keep, x.shape[1]).index_copy_(0, layout.inputs, x)
        if history is not None:
            padded.index_copy_(0, layout.before.flatten(), history.flatten(0, 1))
        wide, taps = padded.to(acc), weight.to(acc).T.contiguous()
        num_out = len(padded) - keep
        mixed = wide[:num_out] * taps[0]
        for j, tap in enumerate(taps[1:], start=1):
            mixed.addcmul_(wide[j : j + num_out], tap)
        points = points_of(spans, borders, keep)
        ctx.save_for_backward(padded, weight, mixed, points)
        ctx.layout, ctx.has_history = layout, history is not None
        y = F.silu(mixed.index_select(0, layout.outputs)).to(x.dtype)
        return y, padded.index_select(0, points.flatten()).view(len(points), keep, x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, d_after: Tensor | None) -> tuple[Tensor | None, ...]:
        padded, weight, mixed, points = ctx.saved_tensors
        layout = ctx.layout
        wide, taps = padded.to(mixed.dtype), weight.to(mixed.dtype).T.contiguous()
        d_padded, d_taps = torch.zeros_like(wide), torch.zeros_like(taps)
        if grad is not None:
            d_mixed = torch.zeros_like(mixed).index_copy_(0, layout.outputs, grad.to(mixed.dtype))
            d_mixed = torch.ops.aten.silu_backward(d_mixed, mixed)
            for j, tap in enumerate(taps):
                window = slice(j, j + len(mixed))
                d_padded[window].addcmul_(d_mixed, tap)
                d_taps[j] = (d_mixed * wide[window]).sum(0)
        if d_after is not None:
            d_padded.index_add_(0, points.flatten(), d_after.flatten(0, 1).to(d_padded.dtype))
        d_x = d_padded.index_select(0, layout.inputs).to(padded.dtype)
        d_history = None
        if ctx.has_history:
            d_history = d_padded.index_select(0, layout.before.flatten()).to(padded.dtype)
            d_history = d_history.view(*layout.before.shape, padded.shape[1])
        return d_x, d_taps.T.to(weight.dtype), d_history, None, None


class Layout(NamedTuple):
    """Rows of the padded layout. A tuple, so that spans can take it to another device.

    inputs int64 [T], of each token; outputs int64 [T], among the rows of `mixed`; before int64 [N, W-1], of histories
    """

    inputs: Tensor
    outputs: Tensor
    before: Tensor


def layout_of(spans: Spans, keep: int) -> Layout:
    """The rows of these spans, made once. `keep` = W-1."""
    return spans.once(("conv", keep), lambda found: Layout(*(to_device(t, found.device) for t in _rows(found, keep))))


def _rows(spans: Spans, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    outputs = np.arange(spans.num_tokens) + np.repeat(np.arange(len(spans)) * keep, spans.lengths)
    firsts = np.asarray(spans.offsets[:-1]) + np.arange(len(spans)) * keep
    before = firsts[:, None] + np.arange(keep)
    return torch.from_numpy(outputs + keep), torch.from_numpy(outputs), torch.from_numpy(before)


def points_of(spans: Spans, borders: Borders, keep: int) -> Tensor:
    """int64 [N + B, W-1]: rows of the inputs before the end of each span, then before each border."""

    def make(found: Spans) -> Tensor:
        ends = [(n, length) for n, length in enumerate(found.lengths)]
        first = [found.offsets[n] + n * keep + length for n, length in (*ends, *borders)]
        return to_device(torch.from_numpy(np.asarray(first, np.int64)[:, None] + np.arange(keep)), found.device)

    return spans.once(("conv points", keep, borders), make)


def short_conv_step(x: Tensor, weight: Tensor, history: Tensor, slots: Tensor) -> Tensor:
    """One token per request: x [N, C], weight [C, W], history [U, W-1, C], slots [N] -> y [N, C].

    Writes history[slots] in place (drops the oldest input, appends x); other slots are untouched.
    """
    window = torch.cat([history[slots], x.to(history.dtype).unsqueeze(1)], dim=1)
    acc = acc_dtype(x.dtype)
    y = (window.to(acc) * weight.to(acc).T).sum(1)
    history[slots] = window[:, 1:]
    return F.silu(y).to(x.dtype)
