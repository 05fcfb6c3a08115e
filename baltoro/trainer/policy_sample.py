"""PolicySample and PolicyBatch: trajectories as the policy's trainer accepts them, and as one forward sees them.

In: ids, which of them count, what the engine recorded (logprobs, maybe routes), advantages. Out: packed tensors for
`policy_step`.
Invariants: a sample is a whole trajectory and becomes one span; row t predicts token t + 1, so what belongs to a token
stands one row before it, and the last row counts never; a micro-batch is never cut inside a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baltoro.errors import ConfigError, ShapeError
from baltoro.model.config import K3Config
from baltoro.model.routes import MISSING, Routes, padded_routes


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
    routes      which experts the engine took for the tokens from the first on, in bytes as `model/routes.py` has them;
                tokens behind their end are left to the trainer's routers; None: nothing is replayed
    """

    tokens: tuple[int, ...]
    num_prompt: int
    is_counted: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantage: float
    is_fresh: tuple[bool, ...] | None = None
    routes: bytes | None = None

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
    routes      of the T tokens, MISSING where nothing was told; None: nothing is replayed
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    rows: Tensor
    targets: Tensor
    old: Tensor
    advantages: Tensor
    trajectory: Tensor
    is_fresh: Tensor
    routes: Routes | None = None

    @property
    def mask(self) -> Tensor:
        """bool [M], all true: hidden rows were left out."""
        return torch.ones_like(self.rows, dtype=torch.bool)

    def to(self, device: torch.device) -> PolicyBatch:
        """The same on `device`."""
        names = ("tokens", "rows", "targets", "old", "advantages", "trajectory", "is_fresh")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        if self.routes is not None:
            moved["routes"] = Routes.of(self.routes.ids.to(device))
        return replace(self, **moved)


def pack_policy(samples: Sequence[PolicySample], micro_tokens: int, model: K3Config | None = None) -> list[PolicyBatch]:
    """Micro-batches of at most `micro_tokens` rows, in the order of the samples; one without a counted token is left
    out, but keeps its number. `model` gives routes their shape; without it they are left out.

    Errors: ConfigError for a trajectory that does not fit, ShapeError for routes that are not its.
    """
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
            batches.append(_lay(part, model))
            part, size = [], 0
        part.append((number, sample))
        size += len(sample)
    return [*batches, _lay(part, model)] if part else batches


def _lay(part: Sequence[tuple[int, PolicySample]], model: K3Config | None) -> PolicyBatch:
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
    routes = None
    if model is not None and any(sample.routes is not None for _, sample in part):
        told = [padded_routes(sample.routes or b"", len(sample), model) for _, sample in part]
        routes = Routes.of(torch.cat(told))
    return PolicyBatch(
        ids,
        tuple(len(sample) for _, sample in part),
        places,
        ids[places + 1],
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(trajectory),
        torch.tensor(fresh),
        routes,
    )


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far routes were replayed, summed over forwards.

    tokens   with routes; missing: without, though a trajectory's last token, which no engine computes, is not counted
    changed  pairs of token and layer for which the trainer's router would have chosen another set of experts
    """

    tokens: int = 0
    missing: int = 0
    changed: int = 0

    def __add__(self, other: Replayed) -> Replayed:
        return Replayed(self.tokens + other.tokens, self.missing + other.missing, self.changed + other.changed)


def replayed(batch: PolicyBatch) -> Replayed:
    """Of the forward that the batch was in last; waits for the device."""
    if batch.routes is None:
        return Replayed()
    is_missing = batch.routes.ids[:, 0, 0] == MISSING
    inner = is_missing.clone()
    inner[torch.tensor(batch.lengths).cumsum(0).to(inner.device) - 1] = False
    found = torch.stack([is_missing.sum(), inner.sum(), batch.routes.changed.sum()]).tolist()
    return Replayed(len(is_missing) - found[0], found[1], found[2])
