"""PolicySample and PolicyBatch: trajectories as the policy's trainer accepts them, and as one forward sees them.

In: ids, which of them count, what the engine recorded, advantages. Out: packed tensors for `policy_step`.
Invariants: a sample is a whole trajectory and becomes one span; row t predicts token t + 1, so what belongs to a token
stands one row before it, and the last row counts never; a micro-batch is never cut inside a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.errors import ConfigError, ShapeError


@dataclass(frozen=True, slots=True)
class PolicySample:
    """One trajectory of an optimizer step.

    tokens      prompt and everything after it
    num_prompt  how many of them are the prompt
    is_counted  of each token after the prompt: sampled by the policy, and counted by the loss
    logprobs    of each token after the prompt, as the engine recorded it
    advantage   of all its tokens
    is_fresh    of each token after the prompt: sampled by the version that is trained now, so that engine and trainer
                must agree on it; None: all are
    """

    tokens: tuple[int, ...]
    num_prompt: int
    is_counted: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantage: float
    is_fresh: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        num_after = len(self.tokens) - self.num_prompt
        if not self.num_prompt >= 1 or not num_after == len(self.is_counted) == len(self.logprobs):
            raise ShapeError(
                f"{len(self.tokens)} tokens, {self.num_prompt} of the prompt, {len(self.is_counted)} flags, "
                f"{len(self.logprobs)} logprobs"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_counted(self) -> int:
        return sum(self.is_counted)


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """T packed tokens of N trajectories, of which M rows count.

    tokens      int64 [T]; lengths of the N spans
    rows        int64 [M], rows that predict a counted token; targets int64 [M], that token
    old         float64 [M], the engine's logprob of it
    advantages  float64 [M]; trajectory int64 [M], its number within the step
    is_fresh    bool [M], see PolicySample
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    rows: Tensor
    targets: Tensor
    old: Tensor
    advantages: Tensor
    trajectory: Tensor
    is_fresh: Tensor

    @property
    def mask(self) -> Tensor:
        """bool [M], all true: hidden rows were left out."""
        return torch.ones_like(self.rows, dtype=torch.bool)

    def to(self, device: torch.device) -> PolicyBatch:
        """The same on `device`."""
        moved = (self.rows, self.targets, self.old, self.advantages, self.trajectory, self.is_fresh)
        return PolicyBatch(self.tokens.to(device), self.lengths, *(t.to(device) for t in moved))


def pack_policy(samples: Sequence[PolicySample], micro_tokens: int) -> list[PolicyBatch]:
    """Micro-batches of at most `micro_tokens` rows, in the order of the samples; one without a counted token is left
    out, but keeps its number. Errors: ConfigError for a trajectory that does not fit."""
    batches: list[PolicyBatch] = []
    part: list[tuple[int, PolicySample]] = []
    size = 0
    for number, sample in enumerate(samples):
        if len(sample) > micro_tokens:
            raise ConfigError(
                f"a trajectory of {len(sample)} tokens does not fit into optim.micro_tokens {micro_tokens}: raise it"
            )
        if not sample.num_counted:
            continue
        if size + len(sample) > micro_tokens:
            batches.append(_lay(part))
            part, size = [], 0
        part.append((number, sample))
        size += len(sample)
    return [*batches, _lay(part)] if part else batches


def _lay(part: Sequence[tuple[int, PolicySample]]) -> PolicyBatch:
    """Trajectories end to end."""
    tokens: list[int] = []
    rows: list[int] = []
    old: list[float] = []
    advantages: list[float] = []
    trajectory: list[int] = []
    fresh: list[bool] = []
    for number, sample in part:
        first = len(tokens) + sample.num_prompt - 1
        at = [i for i, is_counted in enumerate(sample.is_counted) if is_counted]
        rows += [first + i for i in at]
        old += [sample.logprobs[i] for i in at]
        advantages += [sample.advantage] * len(at)
        trajectory += [number] * len(at)
        fresh += [sample.is_fresh is None or sample.is_fresh[i] for i in at]
        tokens += sample.tokens
    ids, places = torch.tensor(tokens), torch.tensor(rows)
    return PolicyBatch(
        ids,
        tuple(len(sample) for _, sample in part),
        places,
        ids[places + 1],
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(trajectory),
        torch.tensor(fresh),
    )
