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
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, overload

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
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def update_scale(rows: int, columns: int) -> float:
    """Factor on the orthogonal block; `rows` and `columns` are the block's."""
    return RMS_OF_ADAM * math.sqrt(max(rows, columns))


class _Moved(NamedTuple):
    """A parameter that has a gradient, and what it is moved by; [blocks, rows, columns] views."""

    parameter: Tensor
    look: Tensor

    @property
    def is_tall(self) -> bool:
        return self.look.shape[-2] > self.look.shape[-1]


class Muon(torch.optim.Optimizer):
    """A group: {"params": [...], "blocks": n}; every parameter of a group is viewed as [n, -1, last dimension].

    Blocks of one shape, or of its transpose, form one stack over all groups of the same settings, orthogonalised at
    once; everything else is one operation over all parameters.
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
        alike: dict[tuple[float, ...], list[dict[str, Any]]] = defaultdict(list)
        for group in self.param_groups:
            alike[tuple(group[key] for key in ("lr", "momentum", "weight_decay", "steps"))].append(group)
        for groups in alike.values():
            self._step(groups)
        return None

    def _step(self, groups: list[dict[str, Any]]) -> None:
        """One step of groups with the same settings."""
        held = [(p, group["blocks"]) for group in groups for p in group["params"] if p.grad is not None]
        if not held:
            return
        settings, parameters, gradients = groups[0], [p for p, _ in held], [p.grad for p, _ in held]
        momenta = [self._momentum(p) for p in parameters]
        torch._foreach_mul_(momenta, settings["momentum"])
        torch._foreach_add_(momenta, gradients)
        looks = torch._foreach_add(gradients, momenta, alpha=settings["momentum"])
        torch._foreach_mul_(parameters, 1.0 - settings["lr"] * settings["weight_decay"])
        stacks: dict[tuple[int, int], list[_Moved]] = defaultdict(list)
        for (parameter, blocks), look in zip(held, looks, strict=True):
            moved = _Moved(*(x.view(blocks, -1, parameter.shape[-1]) for x in (parameter, look)))
            rows, columns = moved.look.shape[-2:]
            stacks[min(rows, columns), max(rows, columns)].append(moved)
        for (short, long), members in stacks.items():
            members.sort(key=lambda one: one.is_tall)
            updates = _updates(members, settings["steps"])
            rate = settings["lr"] * update_scale(short, long)
            torch._foreach_add_([one.parameter for one in members], updates, alpha=-rate)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum


def _updates(members: list[_Moved], steps: int) -> list[Tensor]:
    """Orthogonal factors of blocks of one shape, wide ones first, tall ones transposed into the same stack."""
    wide = [one.look for one in members if not one.is_tall]
    tall = [one.look for one in members if one.is_tall]
    stack = orthogonalise(torch.cat([*wide, *(look.mT for look in tall)]), steps=steps)
    sizes = [sum(len(look) for look in looks) for looks in (wide, tall)]
    first, second = torch.split(stack, sizes)
    parts = list(torch.split(first, [len(look) for look in wide])) if wide else []
    return parts + (list(torch.split(second.mT.contiguous(), [len(look) for look in tall])) if tall else [])
