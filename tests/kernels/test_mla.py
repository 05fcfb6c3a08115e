"""Latent attention: expanded against a per-query softmax, absorbed against expanded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.mla import decode, reference
from baltoro.kernels.mla.reference import attend
from baltoro.kernels.spans import Spans

H, DQ, DV = 3, 6, 5


def naive(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [Q, H, Dq] are the last Q tokens of the keys; one softmax per query and head."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for i in range(q.shape[0]):
        seen = k.shape[0] - q.shape[0] + i + 1
        for h in range(q.shape[1]):
            share = torch.softmax(k[:seen, h] @ q[i, h] * scale, dim=0)
            out[i, h] = share @ v[:seen, h]
    return out


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_spans_with_context_equal_a_softmax_per_query() -> None:
    spans = Spans.build([4, 1, 7, 3], [0, 6, 2, 0])
    q, k, v = randn(15, H, DQ), randn(sum(spans.ends), H, DQ), randn(sum(spans.ends), H, DV)
    out = attend(q, k, v, spans=spans, scale=0.37, out_dtype=torch.float64)
    firsts = [0, 4, 11, 20]
    expected = [
        naive(q[spans.offsets[n] : spans.offsets[n + 1]], k[f : f + spans.ends[n]], v[f : f + spans.ends[n]], 0.37)
        for n, f in enumerate(firsts)
    ]
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-12, rtol=0)


def test_long_span_equals_a_softmax_per_query() -> None:
    spans = Spans.build([530], [11])
    q, k, v = randn(530, 1, DQ), randn(541, 1, DQ), randn(541, 1, DV)
    out = attend(q, k, v, spans=spans, scale=0.4, out_dtype=torch.float64)
    torch.testing.assert_close(out, naive(q, k, v, 0.4), atol=1e-12, rtol=0)


def test_gradients_of_attend() -> None:
    spans = Spans.build([3, 2], [1, 0])
    args = [randn(n, 2, d).requires_grad_() for n, d in ((5, 4), (6, 4), (6, 3))]
    assert torch.autograd.gradcheck(
        lambda q, k, v: attend(q, k, v, spans=spans, scale=0.5, out_dtype=torch.float64), args
    )


def test_output_dtype_is_chosen_by_the_caller() -> None:
    q, k, v = (torch.randn(5, H, d).bfloat16() for d in (DQ, DQ, DV))
    wide = attend(q, k, v, spans=Spans.build([5]), scale=0.4, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    expected = naive(q.double(), k.double(), v.double(), 0.4)
    torch.testing.assert_close(wide.double(), expected, atol=1e-5, rtol=1e-5)


def test_keys_that_do_not_fit_the_spans_are_a_shape_error() -> None:
    with pytest.raises(ShapeError):
        attend(randn(2, H, DQ), randn(2, H, DQ), randn(2, H, DV), spans=Spans.build([2], [1]), scale=1.0,
               out_dtype=torch.float64)  # fmt: skip


R, DR, DN, PAGE = 6, 2, 4, 4
Absorbed = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(params=[reference.attend_absorbed, decode.attend_absorbed], ids=["reference", "decode"])
def attend_absorbed(request: pytest.FixtureRequest) -> Absorbed:
    """The forms of absorbed attention."""
    form: Absorbed = request.param
    return form


def paged(rows: list[Tensor], num_pages: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Scatter the rows of each request over shuffled pages; whatever is not a row is NaN."""
    kv = torch.full((num_pages, PAGE, R + DR), float("nan"), dtype=torch.float64)
    free = [7, 2, 5, 1, 8, 3, 6, 4]
    table = torch.zeros(len(rows), max(-(-len(x) // PAGE) for x in rows) + 1, dtype=torch.int64)
    for n, x in enumerate(rows):
        for j, piece in enumerate(x.split(PAGE)):
            table[n, j] = page = free.pop(0)
            kv[page, : len(piece)] = piece
    return kv, table, torch.tensor([len(x) for x in rows])


def test_absorbed_equals_expanded_through_kv_b_with_nan_beyond_the_lengths(attend_absorbed: Absorbed) -> None:
    rows = [randn(n, R + DR) for n in (5, 1, 8)]
    kv_b = randn(H, DN + DV, R)  # per head: rows of k_nope, then rows of v
    q = randn(3, H, DN + DR)
    kv, table, lengths = paged(rows)
    query = torch.cat([torch.einsum("nhd,hdr->nhr", q[..., :DN], kv_b[:, :DN]), q[..., DN:]], dim=-1)
    out, lse = attend_absorbed(query, kv, table, lengths, latent=R, scale=0.31)
    values = torch.einsum("nhr,hvr->nhv", out, kv_b[:, DN:])
    for n, x in enumerate(rows):
        expanded = torch.einsum("hdr,sr->shd", kv_b, x[:, :R])
        k = torch.cat([expanded[..., :DN], x[:, None, R:].expand(-1, H, -1)], dim=-1)
        expected = attend(q[n : n + 1], k, expanded[..., DN:], spans=Spans.build([1], [len(x) - 1]), scale=0.31,
                          out_dtype=torch.float64)  # fmt: skip
        torch.testing.assert_close(values[n], expected[0], atol=1e-12, rtol=0)
        scores = torch.einsum("hd,shd->hs", q[n], k) * 0.31
        torch.testing.assert_close(lse[n], torch.logsumexp(scores, -1), atol=1e-12, rtol=0)


def test_parts_of_a_sequence_merge_by_their_log_sum_exp(attend_absorbed: Absorbed) -> None:
    rows = randn(7, R + DR)
    query = randn(1, H, R + DR)
    whole, whole_lse = attend_absorbed(query, *paged([rows]), latent=R, scale=0.5)
    parts = [attend_absorbed(query, *paged([x]), latent=R, scale=0.5) for x in (rows[:3], rows[3:])]
    lse = torch.stack([p[1] for p in parts])
    torch.testing.assert_close(torch.logsumexp(lse, 0), whole_lse, atol=1e-13, rtol=0)
    merged = sum((torch.exp(p[1] - whole_lse).unsqueeze(-1) * p[0]) for p in parts)
    torch.testing.assert_close(merged, whole, atol=1e-13, rtol=0)


def test_no_keys_give_zero_output_and_minus_infinite_lse(attend_absorbed: Absorbed) -> None:
    kv, table, _ = paged([randn(3, R + DR)])
    out, lse = attend_absorbed(randn(1, H, R + DR), kv, table, torch.tensor([0]), latent=R, scale=1.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))


def test_a_window_is_its_tokens_one_by_one(attend_absorbed: Absorbed) -> None:
    """The last sees all keys, each before it one less; the first tokens of the short request see none."""
    kv, table, lengths = paged([randn(n, R + DR) for n in (9, 2)])
    query = randn(2, 4, H, R + DR)
    out, lse = attend_absorbed(query, kv, table, lengths, latent=R, scale=0.5)
    for t in range(4):
        seen = (lengths - (3 - t)).clamp_min(0)
        alone = attend_absorbed(query[:, t], kv, table, seen, latent=R, scale=0.5)
        torch.testing.assert_close((out[:, t], lse[:, t]), alone, atol=1e-13, rtol=0)
    assert not out[1, :2].any() and out[1, 2:].all()


def test_large_scores_do_not_overflow(attend_absorbed: Absorbed) -> None:
    kv, table, lengths = paged([randn(5, R + DR) * 1e3])
    out, lse = attend_absorbed(randn(1, H, R + DR) * 1e3, kv, table, lengths, latent=R, scale=1.0)
    assert out.isfinite().all() and lse.isfinite().all()
