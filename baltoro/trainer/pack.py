"""Samples -> packed variable-length micro-batches.

In: a mixture of corpora, a stage, a token budget; or samples. Out: MicroBatch, whose spans are the samples.
Invariants: nothing is padded; a dialogue is never cut, prose is cut where it fills the rest of a budget.
Limit: the size of a micro-batch decides where prose is cut, so two sizes train on the same text, cut differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baltoro.errors import ConfigError
from baltoro.trainer.config import BatchConfig, StageConfig
from baltoro.trainer.data import Mixture
from baltoro.trainer.sample import MicroBatch, TrainSample


def pack(samples: Sequence[TrainSample]) -> MicroBatch:
    """Lay samples end to end."""
    return MicroBatch(
        torch.cat([s.tokens for s in samples]),
        torch.cat([s.targets for s in samples]),
        torch.cat([s.weights for s in samples]),
        tuple(len(s) for s in samples),
        tuple(s.source for s in samples),
        tuple(s.pictures for s in samples if s.pictures is not None),
    )


def fill(mixture: Mixture, stage: StageConfig, budget: int) -> MicroBatch:
    """Take samples until the next one does not fit into `budget` tokens."""
    samples: list[TrainSample] = []
    room = budget
    while room > 0 and (sample := mixture.take(stage, room)) is not None:
        samples.append(sample)
        room -= len(sample)
    if not samples:
        raise ConfigError(
            f"the next document does not fit into a micro-batch of {budget} tokens; raise batch.micro_tokens"
        )
    return pack(samples)


def step_batches(mixture: Mixture, stage: StageConfig, batch: BatchConfig) -> list[MicroBatch]:
    """The micro-batches of one optimizer step."""
    rest = batch.tokens % batch.micro_tokens
    budgets = [batch.micro_tokens] * (batch.tokens // batch.micro_tokens)
    if rest >= stage.max_length:
        budgets.append(rest)
    return [fill(mixture, stage, budget) for budget in budgets]
