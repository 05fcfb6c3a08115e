"""Padded batches through fused attention equal the reference, gradients too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.kernels.mla import padded, reference
from baltoro.kernels.spans import Spans

H, DQ, DV = 3, 10, 6


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((rows, H, DQ), (rows, H, DQ), (rows, H, DV))
    q, k, v = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("lengths", [(5,), (64, 64), (1, 65, 3, 200, 64, 128, 129), (2,) * 9])
def test_padded_equals_reference_with_gradients(lengths: tuple[int, ...]) -> None:
    spans = Spans.build(lengths)
    q, k, v = inputs(spans.num_tokens)
    results = []
    for attend in (reference.attend, padded.attend):
        out = attend(q, k, v, spans=spans, scale=0.3, out_dtype=torch.float64)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        results.append((out, *torch.autograd.grad((out * weights).sum(), (q, k, v))))
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


def test_spans_with_a_past_go_to_the_reference() -> None:
    spans = Spans.build((3, 2), (4, 0))
    q, _, _ = inputs(5)
    _, k, v = inputs(sum(spans.ends))
    expected = reference.attend(q, k, v, spans=spans, scale=0.3, out_dtype=torch.float64)
    got = padded.attend(q, k, v, spans=spans, scale=0.3, out_dtype=torch.float64)
    assert torch.equal(got, expected)


def test_every_row_is_real_once() -> None:
    spans = Spans.build((1, 65, 3, 200, 64))
    rows = torch.cat([places[is_real] for places, is_real in padded.buckets(spans)])
    assert rows.sort().values.tolist() == list(range(spans.num_tokens))
