"""TrainSample and MicroBatch: what the trainer accepts, and what one forward sees.

In: ids from a corpus (`data.py`) or a rollout. Out: tensors for `model.context.train_context` and `loss.py`.
Invariants: a sample is one document piece and becomes one span, so nothing leaks between samples; `targets[t]` is the
token after `tokens[t]`, or NO_TARGET where there is none (then its weight is 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baltoro.errors import ShapeError

NO_TARGET = -1


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One piece of one document.

    tokens   int64 [T]; targets int64 [T]; weights float32 [T], how much the prediction of each target counts
    source   name of the corpus, for the logs
    pictures uint8 [n, height, width], grey, in the order of their media pads; None: none
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    source: str
    pictures: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        if not self.tokens.shape == self.targets.shape == self.weights.shape:
            raise ShapeError(
                f"sample of {tuple(self.tokens.shape)} tokens, {tuple(self.targets.shape)} targets, "
                f"{tuple(self.weights.shape)} weights"
            )

    def __len__(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples laid end to end, on the host: T tokens of N spans. `sources`: the corpus of each span; `pictures`: of all
    spans."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    lengths: tuple[int, ...]
    sources: tuple[str, ...]
    pictures: tuple[NDArray[np.uint8], ...] = ()

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]

    def ahead(self, distance: int) -> tuple[Tensor, Tensor]:
        """(targets, weights) `distance` rows further on in the same span; NO_TARGET and 0 past its end."""
        ends = np.repeat(np.cumsum(self.lengths), self.lengths)
        wanted = np.arange(self.num_tokens) + distance
        is_inside = torch.from_numpy(wanted < ends)
        rows = torch.from_numpy(np.minimum(wanted, ends - 1))
        return torch.where(is_inside, self.targets[rows], NO_TARGET), torch.where(is_inside, self.weights[rows], 0.0)
