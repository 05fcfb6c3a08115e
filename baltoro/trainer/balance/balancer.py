"""The balancer of a run: counts every training forward, sets the selection biases once per optimizer step.

In: scores and picks, through the routers' observers. Out: `e_score_correction_bias`, written in place; the load.
Invariants: only forwards inside `watching()` count (not evaluation, not a recompute); bins stay those of the step's
starting bias until `update`; a router whose forward never ran keeps its bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.model.decoder import K3Model
from baltoro.model.moe import Router
from baltoro.trainer.balance.quantile import balanced_bias, bin_range, histogram, margins, sign_bias
from baltoro.trainer.config import BalanceConfig


@dataclass(slots=True)
class _Count:
    """What one router's forwards of a step amounted to. Single writer: Balancer."""

    low: float
    high: float
    margins: Tensor  # int64 [E, bins]
    load: Tensor  # int64 [E]


class Balancer:
    """Watches the routers of the model that computes. Single writer of the biases of the model that is trained."""

    def __init__(self, model: K3Model, config: BalanceConfig, *, watched: K3Model | None = None) -> None:
        """`watched`: the model whose forwards count, where it is a copy."""
        self.config = config
        self.routers = _routers(model)
        self.watched = _routers(watched or model)
        self._counts: dict[str, _Count] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Forwards within are counted."""
        for name, router in self.watched.items():
            router.observer = lambda scores, ids, name=name: self._see(name, scores, ids)
        try:
            yield
        finally:
            for router in self.watched.values():
                router.observer = None

    def _see(self, name: str, scores: Tensor, ids: Tensor) -> None:
        bias, num_experts = self.routers[name].e_score_correction_bias, scores.shape[1]
        count = self._counts.get(name)
        if count is None:
            low, high = bin_range(bias)
            zeros = torch.zeros(num_experts, self.config.bins, dtype=torch.int64, device=scores.device)
            count = self._counts[name] = _Count(low, high, zeros, zeros[:, 0].clone())
        if self.config.method == "quantile" and ids.shape[1] < num_experts:  # else there is nothing to choose
            found = margins(scores, bias, ids.shape[1])
            count.margins += histogram(found, count.low, count.high, self.config.bins)
        count.load += torch.bincount(ids.flatten(), minlength=num_experts)

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """Set the biases from the step's counts and forget them. Returns each router's max over mean load."""
        ratios = {}
        for name, count in self._counts.items():
            router = self.routers[name]
            bias, active = router.e_score_correction_bias, router.config.num_active_experts
            if self.config.method == "quantile" and active < router.config.num_experts:
                bias.copy_(balanced_bias(count.margins, active, count.low, count.high))
            elif self.config.method == "sign":
                bias.copy_(sign_bias(bias, count.load, self.config.sign_rate))
            ratios[name] = float(count.load.max() / count.load.to(torch.float64).mean())
        self._counts.clear()
        return ratios


def _routers(model: K3Model) -> dict[str, Router]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}
