"""The mix over depth against a direct softmax."""

from __future__ import annotations

import torch

from baltoro.kernels.attnres.reference import mix


def test_zero_query_is_the_plain_mean() -> None:
    sources = torch.randn(4, 6, 9, dtype=torch.float64)
    mixed = mix(sources, torch.zeros(9, dtype=torch.float64), 1e-5)
    torch.testing.assert_close(mixed, sources.mean(0), atol=1e-14, rtol=0)


def test_mix_equals_a_direct_softmax_over_sources() -> None:
    sources, query = torch.randn(3, 5, 7, dtype=torch.float64) * 3, torch.randn(7, dtype=torch.float64)
    for t in range(5):
        scores = [
            sum(sources[j, t, d] * query[d] for d in range(7)) / (sources[j, t].pow(2).mean() + 1e-5).sqrt()
            for j in range(3)
        ]
        share = torch.tensor(scores, dtype=torch.float64).exp()
        expected = sum(share[j] / share.sum() * sources[j, t] for j in range(3))
        torch.testing.assert_close(mix(sources, query, 1e-5)[t], expected, atol=1e-12, rtol=0)


def test_one_source_is_returned_as_it_is() -> None:
    sources = torch.randn(1, 4, 5, dtype=torch.float64)
    assert torch.equal(mix(sources, torch.randn(5, dtype=torch.float64), 1e-5), sources[0])


def test_scaling_a_source_moves_its_value_but_not_its_share() -> None:
    sources, query = torch.randn(2, 1, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    scaled = sources * torch.tensor([1.0, 100.0]).view(2, 1, 1)
    plain, big = mix(sources, query, 0.0), mix(scaled, query, 0.0)
    share = ((plain - sources[0]) / (sources[1] - sources[0])).mean()
    torch.testing.assert_close(big, (1 - share) * scaled[0] + share * scaled[1], atol=1e-11, rtol=0)


def test_bfloat16_sources_are_mixed_in_float32_and_rounded_once() -> None:
    sources, query = torch.randn(4, 6, 64).bfloat16(), torch.randn(64)
    mixed = mix(sources, query, 1e-5)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), mix(sources.float(), query, 1e-5), rtol=2**-8, atol=1e-6)


def test_gradients_of_sources_and_query() -> None:
    sources = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    query = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s, w: mix(s, w, 1e-5), (sources, query))


def test_mix_is_the_same_with_and_without_gradients() -> None:
    sources, query = torch.randn(4, 6, 9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    with torch.no_grad():
        plain = mix(sources, query, 1e-5)
    torch.testing.assert_close(plain, mix(sources, query, 1e-5), atol=1e-14, rtol=0)
