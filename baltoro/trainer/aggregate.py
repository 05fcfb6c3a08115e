"""From losses of tokens to one number, in sums: the denominators are the whole optimizer step's and come from outside.

In: masks and trajectory numbers of packed rows, and Totals: how many tokens each trajectory of the step counts, over
all micro-batches and ranks. Out: weights [T]; sum(losses * weights) over all micro-batches is the step's loss.
Invariants: the weight of a row depends on its trajectory and the totals alone, so gradients are the same, up to
rounding, for every split of the rows into micro-batches, a trajectory cut in the middle included; a step that counts
nothing is an error.
Source: spec/training.md A.2 (a mean over all of a rollout's tokens, not per segment), C.1, G.3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.errors import ConfigError, InvariantError, ShapeError
from baltoro.trainer.policy_config import Aggregation
from baltoro.trainer.ratio import check_rows, log_ratio


@dataclass(frozen=True, slots=True)
class Totals:
    """Counted tokens of each trajectory of an optimizer step: int64 [num_trajectories], on the rows' device.

    A trajectory without counted tokens has no loss and is in no denominator.
    """

    lengths: Tensor

    def __post_init__(self) -> None:
        if self.lengths.dim() != 1 or self.lengths.is_floating_point():
            raise ShapeError("totals are integers [num_trajectories]")
        if not bool((self.lengths > 0).any()):
            raise InvariantError("the step counts no token: every trajectory is excluded or masked; skip the step")

    @property
    def tokens(self) -> int:
        """Counted tokens of the step."""
        return int(self.lengths.sum())

    @property
    def trajectories(self) -> int:
        """Trajectories with at least one counted token."""
        return int((self.lengths > 0).sum())


def totals(parts: Iterable[tuple[Tensor, Tensor]], num_trajectories: int) -> Totals:
    """Totals of all micro-batches: pairs (mask bool [T], trajectory int64 [T], numbers within the step)."""
    lengths = torch.zeros(num_trajectories, dtype=torch.int64)
    for mask, trajectory in parts:
        check_rows(mask, trajectory)
        lengths = lengths.to(mask.device).index_add(0, trajectory, mask.long())
    return Totals(lengths)


def row_weights(
    mask: Tensor, trajectory: Tensor, of_step: Totals, mode: Aggregation, *, fixed_length: int | None = None
) -> Tensor:
    """What each row's loss counts in the step's: float64 [T], 0 where the mask hides.

    token_mean       1 / counted tokens of the step
    trajectory_mean  1 / (trajectories * counted tokens of the row's trajectory)
    fixed_length     1 / (trajectories * fixed_length): long trajectories are not told from short ones
    """
    check_rows(mask, trajectory)
    if mode == "token_mean":
        weights = torch.full(mask.shape, 1.0 / of_step.tokens, dtype=torch.float64, device=mask.device)
    elif mode == "trajectory_mean":
        weights = 1.0 / (of_step.trajectories * of_step.lengths[trajectory].clamp(min=1).double())
    else:
        if fixed_length is None:
            raise ConfigError("aggregation fixed_length needs policy.fixed_length, the longest answer in tokens")
        scale = 1.0 / (of_step.trajectories * fixed_length)
        weights = torch.full(mask.shape, scale, dtype=torch.float64, device=mask.device)
    return torch.where(mask, weights, torch.zeros_like(weights))


def sum_by_trajectory(values: Tensor, mask: Tensor, trajectory: Tensor, num_trajectories: int) -> Tensor:
    """Sums [num_trajectories] of the rows shown, in the dtype of `values`; those of micro-batches add up."""
    check_rows(mask, values, trajectory)
    values = torch.where(mask, values, torch.zeros_like(values))
    return torch.zeros(num_trajectories, dtype=values.dtype, device=values.device).index_add(0, trajectory, values)


def mean_log_ratios(
    now: Tensor, old: Tensor, mask: Tensor, trajectory: Tensor, of_step: Totals, *, sums: Tensor | None = None
) -> Tensor:
    """Mean log-ratio of each row's trajectory, for GSPO: [T], no gradient.

    sums  of log-ratios of each trajectory over the step (`sum_by_trajectory`), if trajectories are cut between
          micro-batches; None: every trajectory lies in this micro-batch as a whole
    Errors  ShapeError if one does not and `sums` is missing
    """
    count = len(of_step.lengths)
    if sums is None:
        here = sum_by_trajectory(mask.long(), mask, trajectory, count)
        cut = ((here > 0) & (here != of_step.lengths)).nonzero().flatten().tolist()
        if cut:
            raise ShapeError(f"trajectories {cut} are cut between micro-batches: GSPO needs the sums of log-ratios")
        sums = sum_by_trajectory(log_ratio(now.detach(), old, mask), mask, trajectory, count)
    return (sums.detach() / of_step.lengths.clamp(min=1).to(sums.dtype))[trajectory]
