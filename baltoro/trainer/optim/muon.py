"""Per-head Muon: momentum, orthogonalised block by block.

In: parameters seen as stacks of blocks [B, rows, columns] (a head's rows, an expert's matrix, or the whole matrix), and
their gradients. Out: parameters moved in place by -lr * 0.2 * sqrt(max(rows, columns)) * orthogonal factor, after
decoupled weight decay; the scale matches the RMS of Adam's update, so Adam's rate and decay carry over.
Invariants: every block is normalised by its own norm, so the update of a head does not depend on which other heads lie
in the same stack: shards that hold whole heads give bit-identical updates. A parameter without a gradient stays.
Limit: five quintic steps bring singular values near 1 (about 0.7 to 1.15), not to 1.
Source: spec/training.md C.7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

# quintic p(x) = a x + b x^3 + c x^5, steep at 0 so that small singular values rise fast
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
RMS_OF_ADAM = 0.2  # typical RMS of an Adam update at rate 1 (Moonlight)


def orthogonalise(blocks: Tensor, *, steps: int = 5) -> Tensor:
    """Newton-Schulz on each block of [B, rows, columns]: U V^T of its SVD, roughly. Same shape and dtype."""
    is_tall = blocks.shape[-2] > blocks.shape[-1]
    x: Tensor = blocks.mT if is_tall else blocks
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x


def update_scale(rows: int, columns: int) -> float:
    """Factor on the orthogonal block; `rows` and `columns` are the block's."""
    return RMS_OF_ADAM * math.sqrt(max(rows, columns))


class Muon(torch.optim.Optimizer):
    """One parameter group per (number of blocks, block shape): its blocks form one stack, orthogonalised at once.

    A group: {"params": [...], "blocks": n}; every parameter of a group is viewed as [n, -1, last dimension].
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        steps: int = 5,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps, "blocks": 1}
        super().__init__(groups, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter that has a gradient. Nesterov momentum: M <- mu M + G, then mu M + G is used."""
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if not moved:
                continue
            looks = []
            for parameter in moved:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                look = parameter.grad.add(momentum, alpha=group["momentum"])
                looks.append(look.view(group["blocks"], -1, parameter.shape[-1]))
            stack = orthogonalise(torch.cat(looks), steps=group["steps"])
            scale = update_scale(stack.shape[-2], stack.shape[-1])
            for parameter, update in zip(moved, torch.split(stack, group["blocks"]), strict=True):
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(update.reshape(parameter.shape), alpha=-group["lr"] * scale)
        return None
