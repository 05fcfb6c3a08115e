"""What a step did: numbers that stay on the device until someone wants to read them, and the record they become.

In: tensors of a step. Out: StepRecord. Reading waits for the device, so a run reads several steps at once.
Invariants: the numbers of a step do not depend on when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.trainer.prepare import Prepared


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step did, for the log. Losses are means in nats per counted token; `sources` by corpus."""

    step: int
    stage: int
    tokens: int
    loss: float
    mtp_loss: float
    sources: dict[str, float]
    lr: float
    grad_norm: float
    max_logit: float
    loads: dict[str, float]


@dataclass(frozen=True, slots=True)
class Pending:
    """A step that was launched. `numbers` float64 [3 + S + R] on the device: the sum of the MTP losses, the norm of the
    gradients, the largest attention logit, the losses summed by corpus, the load of each router."""

    step: int
    stage: int
    tokens: int
    lr: float
    ahead_total: float
    sources: tuple[str, ...]
    source_weights: tuple[float, ...]
    routers: tuple[str, ...]
    numbers: Tensor


def read_records(pending: Sequence[Pending]) -> list[StepRecord]:
    """Wait for the device once, and make the records."""
    if not pending:
        return []
    values: list[float] = torch.cat([one.numbers for one in pending]).tolist()
    records, first = [], 0
    for one in pending:
        last = first + len(one.numbers)
        records.append(_record(one, values[first:last]))
        first = last
    return records


def _record(one: Pending, values: list[float]) -> StepRecord:
    ahead, grad_norm, max_logit = values[:3]
    sums = values[3 : 3 + len(one.sources)]
    return StepRecord(
        step=one.step,
        stage=one.stage,
        tokens=one.tokens,
        loss=mean_loss(sums, one.source_weights),
        mtp_loss=ahead / one.ahead_total,
        sources={n: s / w for n, s, w in zip(one.sources, sums, one.source_weights, strict=True) if w > 0},
        lr=one.lr,
        grad_norm=grad_norm,
        max_logit=max_logit,
        loads=dict(zip(one.routers, values[3 + len(sums) :], strict=True)),
    )


def mean_loss(sums: Sequence[float], weights: Sequence[float]) -> float:
    """Per counted token, over all corpora."""
    return sum(sums) / max(sum(weights), 1.0)


def source_sums(batch: Prepared, losses: Tensor) -> Tensor:
    """float64 [S]: losses [T] times weights, summed by corpus. Rows of weight 0 may even be infinite."""
    weights = batch.weights.to(losses.dtype)
    counted = torch.where(weights > 0, losses * weights, torch.zeros_like(losses)).to(torch.float64)
    places = torch.arange(len(batch.sources), device=losses.device)
    return counted @ (batch.source_rows.unsqueeze(1) == places).to(torch.float64)
