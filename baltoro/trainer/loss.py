"""Losses: pure functions on packed [T] vectors.

In: logits, targets, weights. Out: per-token losses, and sums of them; never a mean, because the denominator is the
weight of the whole optimizer step, over all micro-batches (and ranks), and is known to the step alone.
Invariants: a row without a target has loss exactly 0 and gradient exactly 0; sums are in the accumulate dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from baltoro.kernels.precision import acc_dtype
from baltoro.trainer.sample import NO_TARGET


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats of each target under its row of logits; 0 where the target is NO_TARGET.

    Shapes  logits [T, X], targets int64 [T] -> [T] in the accumulate dtype
    """
    logits = logits.to(acc_dtype(logits.dtype))
    return F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="none")


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Sum of losses * weights. Rows of weight 0 are selected away first, so that they may even be infinite."""
    weights = weights.to(losses.dtype)
    return torch.where(weights > 0, losses * weights, torch.zeros_like(losses)).sum()
