"""The sampling kernel under the interpreter: the ids of the reference, whatever the filters."""

from __future__ import annotations

import pytest
import torch

from baltoro.kernels.sample import fast
from baltoro.kernels.sample.reference import sample


def same(logits: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float], seed: int) -> None:
    uniform = torch.rand(len(logits), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    options = (torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))
    assert torch.equal(fast.sample(logits, *options, uniform), sample(logits, *options, uniform))


@pytest.mark.parametrize("width", [5, 300])
def test_ids_are_those_of_the_reference(width: int) -> None:
    logits = torch.randn(8, width) * torch.linspace(0.3, 4, 8).unsqueeze(1)
    logits[1, ::3], logits[2, 1] = float("-inf"), 40.0
    top_k = [0, 3, 0, 1, 4, 50, 0, 0]
    top_p = [1.0, 0.8, 0.9, 0.5, 0.7, 0.95, 0.3, 1.0]
    min_p = [0.0, 0.1, 0.0, 0.0, 0.2, 0.01, 0.0, 0.05]
    same(logits, top_k, top_p, min_p, 1)


def test_a_row_of_many_blocks() -> None:
    same(torch.randn(1, 9000), [40], [0.9], [0.0], 1)


def test_equal_logits_stay_together_at_a_border() -> None:
    logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, -1.0]]).repeat(4, 1)
    for seed, (top_k, top_p) in enumerate([(1, 1.0), (3, 1.0), (0, 0.3), (0, 0.7), (3, 0.9)]):
        same(logits, [top_k] * 4, [top_p] * 4, [0.0] * 4, seed)


def test_numbers_at_both_ends_and_no_rows() -> None:
    logits = torch.tensor([[float("-inf"), 0.5, 1.0, float("-inf")]]).repeat(2, 1)
    uniform = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    options = (torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.zeros(2))
    assert fast.sample(logits, *options, uniform).tolist() == [1, 2]
    assert fast.sample(logits[:0], *(one[:0] for one in options), uniform[:0]).shape == (0,)
