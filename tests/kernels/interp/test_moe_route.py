"""The routing kernel under the interpreter."""

from __future__ import annotations

import pytest
import torch

from baltoro.kernels.moe import fast_route
from baltoro.kernels.moe.reference import route
from tests.kernels.tolerances import TOLERANCES


@pytest.mark.parametrize(("num_experts", "top_k"), [(896, 16), (7, 3), (64, 6), (5, 1), (16, 16)])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_picks_and_weights_are_those_of_the_reference(num_experts: int, top_k: int, activation: str) -> None:
    logits, bias = torch.randn(3, num_experts), torch.randn(num_experts) * 0.3
    options = {"top_k": top_k, "activation": activation, "is_renormalised": top_k != 6, "scaling": 2.5}
    ids, weights = fast_route.route(logits, bias, **options)
    expected_ids, expected = route(logits.double(), bias.double(), **options)
    assert torch.equal(ids, expected_ids) and weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), expected, rtol=TOLERANCES["route"]["float32"], atol=1e-8)


def test_ties_go_to_the_lowest_expert_also_across_the_border() -> None:
    logits = torch.zeros(3, 12)
    logits[1, 4::2], logits[2, 9] = 1.0, -0.0
    options = {"top_k": 5, "activation": "sigmoid", "is_renormalised": True, "scaling": 1.0}
    assert torch.equal(
        fast_route.route(logits, torch.zeros(12), **options)[0], route(logits, torch.zeros(12), **options)[0]
    )


def test_odd_keys_have_an_order_too() -> None:
    logits, bias = torch.randn(2, 9), torch.zeros(9)
    bias[2], bias[5], bias[7] = float("nan"), float("-inf"), float("inf")
    options = {"top_k": 9, "activation": "sigmoid", "is_renormalised": False, "scaling": 1.0}
    ids, _ = fast_route.route(logits, bias, **options)
    assert torch.equal(ids, route(logits, bias, **options)[0])
    assert ids[:, :2].tolist() == [[2, 7]] * 2 and ids[:, -1].tolist() == [5, 5]


def test_picks_are_counted_on_top_of_what_is_there() -> None:
    logits, bias, counts = torch.randn(6, 10), torch.zeros(10), torch.full((10,), 2, dtype=torch.int32)
    options = {"activation": "sigmoid", "is_renormalised": True, "scaling": 1.0}
    ids, _ = fast_route.select(logits, bias, counts, top_k=4, **options)
    assert torch.equal(counts, 2 + torch.bincount(ids.flatten(), minlength=10).int())


def test_no_tokens_are_no_launch() -> None:
    options = {"top_k": 2, "activation": "sigmoid", "is_renormalised": True, "scaling": 1.0}
    ids, weights = fast_route.route(torch.empty(0, 8), torch.zeros(8), **options)
    assert ids.shape == weights.shape == (0, 2)
