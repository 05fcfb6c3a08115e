"""Losses by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from baltoro.trainer.config import OptimConfig
from baltoro.trainer.loss import token_losses, weighted_sum
from baltoro.trainer.sample import NO_TARGET
from baltoro.trainer.schedule import lr_factor


def test_token_losses_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0], [5.0, -5.0]], dtype=torch.float64)
    losses = token_losses(logits, torch.tensor([1, 0, NO_TARGET]))
    torch.testing.assert_close(losses, torch.tensor([math.log(4 / 3), math.log(2), 0.0], dtype=torch.float64))


def test_rows_without_a_target_have_no_gradient() -> None:
    logits = torch.randn(4, 7, requires_grad=True)
    token_losses(logits, torch.tensor([3, NO_TARGET, 0, NO_TARGET])).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert (logits.grad[[1, 3]] == 0).all() and (logits.grad[[0, 2]] != 0).all()


def test_half_precision_logits_are_summed_in_float32() -> None:
    assert token_losses(torch.randn(2, 5).bfloat16(), torch.tensor([1, 2])).dtype == torch.float32


def test_weight_zero_hides_even_an_infinite_loss() -> None:
    losses = torch.tensor([2.0, torch.inf, 3.0])
    assert weighted_sum(losses, torch.tensor([1.0, 0.0, 0.5])) == 3.5


def test_schedule_warms_up_then_falls_as_a_cosine() -> None:
    optim = OptimConfig(warmup=0.01, final_lr=0.1)
    factors = [lr_factor(step, 1000, optim) for step in range(1000)]
    assert factors[:10] == [(step + 1) / 10 for step in range(10)]
    assert factors[10] == 1.0 and all(a >= b for a, b in pairwise(factors[10:]))
    assert math.isclose(factors[505], 0.55, abs_tol=1e-3) and math.isclose(factors[-1], 0.1, abs_tol=1e-4)


def test_a_run_of_one_step_moves() -> None:
    assert lr_factor(0, 1, OptimConfig()) == 1.0
