"""MLA: what the clip is told, and the two forms of one attention."""

from __future__ import annotations

import torch

from baltoro.kernels.spans import Spans
from baltoro.model.mla import max_logits


def test_largest_logit_is_causal_and_inside_its_span() -> None:
    spans, heads, width, scale = Spans.build((5, 130, 1, 70)), 3, 6, 0.5
    q, k = (torch.randn(spans.num_tokens, heads, width, dtype=torch.float64) for _ in range(2))
    expected = torch.full((heads,), -torch.inf, dtype=torch.float64)
    for first, last in zip(spans.offsets, spans.offsets[1:], strict=False):
        for t in range(first, last):
            scores = torch.einsum("hd,khd->hk", q[t], k[first : t + 1]) * scale
            expected = torch.maximum(expected, scores.amax(dim=1))
    torch.testing.assert_close(max_logits(q, k, spans, scale), expected)


def test_a_future_or_foreign_key_does_not_count() -> None:
    spans = Spans.build((2, 3))
    q, k = torch.ones(5, 1, 1), torch.zeros(5, 1, 1)
    k[1], k[2] = 100.0, 7.0
    q[1], q[4] = 0.5, 2.0
    # 100 is seen by row 1 alone (of its own span), 7 by rows 2 to 4
    assert max_logits(q, k, spans, 1.0).item() == 50.0
    q[1] = 0.0
    assert max_logits(q, k, spans, 1.0).item() == 14.0
