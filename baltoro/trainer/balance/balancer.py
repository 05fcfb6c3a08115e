"""The balancer of a run: counts every training forward, sets the selection biases once per optimizer step.

In: scores and picks, through the routers' observers. Out: `e_score_correction_bias`, written in place; the load.
Invariants: only forwards inside `watching()` count (not evaluation, not a recompute); bins stay those of the step's
starting bias until `update`; a router whose forward never ran keeps its bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baltoro.model.decoder import K3Model
from baltoro.model.moe import Router
from baltoro.trainer.balance.quantile import add_histogram, balanced_bias, bin_range, margins, sign_bias, tally
from baltoro.trainer.config import BalanceConfig


@dataclass(slots=True)
class _Counts:
    """What the forwards of a step amounted to, one row a router. Single writer: Balancer.

    biases [R, E] at the step's start; low, high [R]; margins int64 [R, E, bins]; load int64 [R, E]
    """

    biases: Tensor
    low: Tensor
    high: Tensor
    margins: Tensor
    load: Tensor
    seen: set[str] = field(default_factory=set)


class Balancer:
    """Watches the routers of the model that computes. Single writer of the biases of the model that is trained."""

    def __init__(self, model: K3Model, config: BalanceConfig, *, watched: K3Model | None = None) -> None:
        """`watched`: the model whose forwards count, where it is a copy."""
        self.config = config
        self.routers = _routers(model)
        self.watched = _routers(watched or model)
        self._rows = {name: row for row, name in enumerate(self.routers)}
        self._counts: _Counts | None = None

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
        if self._counts is None:
            self._counts = self._open()
        counts, row, num_experts = self._counts, self._rows[name], scores.shape[1]
        counts.seen.add(name)
        if self.config.method == "quantile" and ids.shape[1] < num_experts:  # else there is nothing to choose
            found = margins(scores, counts.biases[row], ids.shape[1])
            add_histogram(counts.margins[row], found, counts.low[row], counts.high[row])
        tally(counts.load[row], ids)

    def _open(self) -> _Counts:
        biases = torch.stack([router.e_score_correction_bias.detach() for router in self.routers.values()])
        low, high = bin_range(biases)
        margins_seen = torch.zeros(*biases.shape, self.config.bins, dtype=torch.int64, device=biases.device)
        return _Counts(biases, low, high, margins_seen, torch.zeros_like(biases, dtype=torch.int64))

    @torch.no_grad()
    def update(self) -> dict[str, Tensor]:
        """Set the biases from the step's counts and forget them. Returns each router's max over mean load, on its
        device: nothing waits."""
        counts, self._counts = self._counts, None
        if counts is None:
            return {}
        active = next(iter(self.routers.values())).config.num_active_experts
        biases = None
        if self.config.method == "quantile" and active < counts.biases.shape[1]:
            biases = balanced_bias(counts.margins, active, counts.low, counts.high).to(counts.biases.dtype)
        elif self.config.method == "sign":
            biases = sign_bias(counts.biases, counts.load, self.config.sign_rate)
        names = [name for name in self.routers if name in counts.seen]
        if biases is not None:
            found = [biases[self._rows[name]] for name in names]
            torch._foreach_copy_([self.routers[name].e_score_correction_bias for name in names], found)
        ratios = counts.load.amax(-1) / counts.load.to(torch.float64).mean(-1)
        return {name: ratios[self._rows[name]] for name in names}


def _routers(model: K3Model) -> dict[str, Router]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}
