"""QK-clip: keep MLA's attention logits under tau by shrinking the weights that make them.

In: the largest logit of each head over all micro-batches of a step, gathered by the layers' observers during training
forwards. Out: rows of q_b (or q) and kv_b scaled in place, after the optimizer's step.
For head h with largest logit S > tau, gamma = tau / S: q's and k's own rows take sqrt(gamma) each. The key part that
all heads share cannot be scaled for one head, so the query rows against it take the whole gamma. Every logit of the
head is then multiplied by gamma exactly.
Limits: momentum is not rescaled; ranks must take the maximum over each other before `apply` (one process so far).
KDA has nothing to clip: its q and k have length 1.
Source: spec/training.md C.7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from baltoro.model.decoder import K3Model
from baltoro.model.mla import MLA


class QKClip:
    """Watches MLA layers, scales those that are trained. Single writer of `largest`: the observers, until `apply`."""

    def __init__(self, model: K3Model, tau: float | None, *, watched: K3Model | None = None) -> None:
        """`watched`: the model whose forwards are seen, where it is a copy."""
        self.tau = tau
        self.layers = _layers(model)
        self.watched = _layers(watched or model)
        self.largest: dict[str, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Forwards within are seen (nothing is watched where tau is None)."""
        if self.tau is not None:
            for name, layer in self.watched.items():
                layer.logit_observer = lambda found, name=name: self._see(name, found)
        try:
            yield
        finally:
            for layer in self.watched.values():
                layer.logit_observer = None

    def _see(self, name: str, found: Tensor) -> None:
        before = self.largest.get(name)
        self.largest[name] = found if before is None else torch.maximum(before, found)

    @torch.no_grad()
    def apply(self) -> Tensor:
        """Clip what went over tau since the last call; returns the largest logit seen (0 if none was), on its device.

        Whether a head went over is not asked: the others are multiplied by exactly 1.
        """
        if not self.largest:
            return torch.zeros(())
        found = torch.stack(list(self.largest.values()))  # [layers, H]
        if self.tau is not None:
            gamma = torch.clamp(self.tau / found.clamp(min=1e-9), max=1.0)
            scale_heads([self.layers[name] for name in self.largest], gamma)
        self.largest.clear()
        return found.max()


@torch.no_grad()
def scale_heads(layers: Sequence[MLA], gamma: Tensor) -> None:
    """Multiply every attention logit of head h of layer l by gamma[l, h]; writes q_b (or q) and kv_b in place."""
    first = layers[0]
    gamma = gamma[..., None].to(first.kv_b_proj.weight.dtype)
    root = gamma.sqrt()
    queries = torch.cat([root.expand(-1, -1, first.nope), gamma.expand(-1, -1, first.rope)], dim=-1)
    keys = torch.cat([root.expand(-1, -1, first.nope), torch.ones_like(root).expand(-1, -1, first.value)], dim=-1)
    weights = []
    for layer in layers:
        query = layer.q_proj if layer.q_rank is None else layer.q_b_proj
        weights.append(query.weight.view(layer.num_heads, layer.nope + layer.rope, -1))
        weights.append(layer.kv_b_proj.weight.view(layer.num_heads, layer.nope + layer.value, -1))
    factors = [one for pair in zip(queries[..., None], keys[..., None], strict=True) for one in pair]
    torch._foreach_mul_(weights, factors)


def _layers(model: K3Model) -> dict[str, MLA]:
    return {name: module for name, module in model.named_modules() if isinstance(module, MLA)}
