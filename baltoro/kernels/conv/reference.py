"""Short causal depthwise convolution with carried history, then SiLU, in plain torch.

    y[t, c] = SiLU( sum_j weight[c, j] * x[t - (W-1) + j, c] )

Inputs before a span come from its history, the last W-1 inputs of the same request (oldest first); without one they
are zeros. Products and sums in the accumulate dtype, the result in x.dtype. The gradient is written out: autograd would
make a full-size tensor per tap. Source: spec/k3.md 3.4 step 2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from baltoro.errors import ShapeError
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
    if history is None:
        history = x.new_zeros(len(spans), weight.shape[1] - 1, x.shape[1])
    y, after = _ShortConv.apply(x, weight, history.to(x.dtype), spans, borders)  # type: ignore[no-untyped-call]
    return y, after


class _ShortConv(torch.autograd.Function):
    """Works on the spans laid out one after the other, each with its W-1 earlier inputs in front ("padded").

    Output row i of that layout sees inputs i .. i+W-1; the W-1 rows whose window mixes two spans are dropped.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, history: Tensor, spans: Spans, borders: Borders
    ) -> tuple[Tensor, Tensor]:
        keep, acc = weight.shape[1] - 1, acc_dtype(x.dtype)
        parts = [part for n, rows in enumerate(torch.split(x, list(spans.lengths))) for part in (history[n], rows)]
        padded = torch.cat(parts)
        wide, taps = padded.to(acc), weight.to(acc).T.contiguous()
        num_out = len(padded) - keep
        mixed = wide[:num_out] * taps[0]
        for j, tap in enumerate(taps[1:], start=1):
            mixed.addcmul_(wide[j : j + num_out], tap)
        ctx.save_for_backward(padded, weight, mixed)
        ctx.spans, ctx.points = spans, _points(spans, borders, keep)
        outputs = [mixed[rows] for rows in _output_rows(spans, keep)]
        y = F.silu(torch.cat(outputs) if len(outputs) > 1 else outputs[0]).to(x.dtype)
        return y, torch.stack([padded[point : point + keep] for point in ctx.points])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        padded, weight, mixed = ctx.saved_tensors
        spans, keep = ctx.spans, weight.shape[1] - 1
        rows_of = _output_rows(spans, keep)
        d_mixed = torch.zeros_like(mixed)
        for rows, part in zip(rows_of, torch.split(grad, list(spans.lengths)), strict=True):
            d_mixed[rows] = part
        d_mixed = torch.ops.aten.silu_backward(d_mixed, mixed)
        wide, taps = padded.to(mixed.dtype), weight.to(mixed.dtype).T.contiguous()
        d_padded, d_taps = torch.zeros_like(wide), torch.empty_like(taps)
        for j, tap in enumerate(taps):
            window = slice(j, j + len(mixed))
            d_padded[window].addcmul_(d_mixed, tap)
            d_taps[j] = (d_mixed * wide[window]).sum(0)
        for point, part in zip(ctx.points, d_after, strict=True):
            d_padded[point : point + keep] += part
        d_x = torch.cat([d_padded[rows.start + keep : rows.stop + keep] for rows in rows_of])
        d_history = torch.stack([d_padded[rows.start : rows.start + keep] for rows in rows_of])
        return d_x.to(padded.dtype), d_taps.T.to(weight.dtype), d_history.to(padded.dtype), None, None


def _output_rows(spans: Spans, keep: int) -> list[slice]:
    """Rows of each span among the outputs of the padded layout."""
    firsts = [offset + n * keep for n, offset in enumerate(spans.offsets[:-1])]
    return [slice(first, first + length) for first, length in zip(firsts, spans.lengths, strict=True)]


def _points(spans: Spans, borders: Borders, keep: int) -> list[int]:
    """Where the W-1 inputs begin that precede the end of each span, then each border, in the padded layout."""
    rows_of = _output_rows(spans, keep)
    return [rows.stop for rows in rows_of] + [rows_of[n].start + length for n, length in borders]


def short_conv_step(x: Tensor, weight: Tensor, history: Tensor, slots: Tensor) -> Tensor:
    """One token per request: x [N, C], weight [C, W], history [U, W-1, C], slots [N] -> y [N, C].

    Writes history[slots] in place (drops the oldest input, appends x); other slots are untouched.
    """
    window = torch.cat([history[slots], x.to(history.dtype).unsqueeze(1)], dim=1)
    acc = acc_dtype(x.dtype)
    y = (window.to(acc) * weight.to(acc).T).sum(1)
    history[slots] = window[:, 1:]
    return F.silu(y).to(x.dtype)
