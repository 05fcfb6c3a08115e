"""The batches of a run, step after step, made ahead of time by a thread.

In: a mixture of corpora, a recipe. Out: the prepared micro-batches of each step, and their denominators.
Invariants: the order is that of one reader without a thread, whatever is ahead; `state()` is that after the last step
handed out, never that of a step still ahead, so a checkpoint resumes at the next step. Asking for another step than the
next one throws away what is ahead.
Single writer of the mixture: the thread while it makes a step, the feed otherwise; never both.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from baltoro.trainer.config import TrainConfig
from baltoro.trainer.data import Mixture
from baltoro.trainer.pack import step_batches
from baltoro.trainer.prepare import Prepared, prepare


@dataclass(frozen=True, slots=True)
class StepBatches:
    """One step's micro-batches. `total`, `ahead_total`: weight of all targets and all MTP targets, at least 1, for a
    step that counts nothing. `after`: the mixture's state once they were taken."""

    batches: tuple[Prepared, ...]
    total: float
    ahead_total: float
    after: dict[str, Any]


class Feed:
    """See the module docstring."""

    def __init__(self, config: TrainConfig, mixture: Mixture) -> None:
        self._config = config
        self._mixture = mixture
        self._state = mixture.state()
        self._is_ahead = config.data.prefetch
        self._maker: ThreadPoolExecutor | None = None
        self._next: tuple[int, Future[StepBatches]] | None = None

    def take(self, step: int) -> StepBatches:
        """The batches of `step` (from 0), in the host's memory. Errors: those of packing."""
        if self._next is not None and self._next[0] == step:
            found = self._next[1].result()
            self._next = None
        else:
            self._forget()
            found = self._make(step)
        self._state = found.after
        if self._is_ahead and step + 1 < self._config.steps:
            if self._maker is None:
                self._maker = ThreadPoolExecutor(1, thread_name_prefix="feed")
            self._next = step + 1, self._maker.submit(self._make, step + 1)
        return found

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return self._state

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state()`. Errors: ConfigError where the corpora are others."""
        self._forget()
        self._mixture.load_state(state)
        self._state = self._mixture.state()

    def _forget(self) -> None:
        """Drop the step that is ahead, and put the mixture back before it."""
        if self._next is not None:
            self._next[1].exception()  # the thread is done with the mixture
            self._next = None
            self._mixture.load_state(self._state)

    def _make(self, step: int) -> StepBatches:
        config, stage = self._config, self._config.stage(step)
        names = sorted(stage.mix)
        batches = tuple(prepare(b, config.model, names) for b in step_batches(self._mixture, stage, config.batch))
        if torch.device(config.device).type == "cuda":
            batches = tuple(batch.pinned() for batch in batches)
        total = max(sum(batch.total_weight for batch in batches), 1.0)
        ahead = max(sum(batch.ahead_weight for batch in batches), 1.0)
        return StepBatches(batches, total, ahead, self._mixture.state())
