"""The one Linear, the RMSNorm module and the names of their parameters.

In: activations [..., in]; out: [..., out] in the same dtype. No biases: the family has none.
Invariants: `weight` is [out, in]; parameters are created empty, `build.py` or `weights.py` fills them. A Linear may
carry low-rank factors of adapters beside its weight; a step without adapters does not look at them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baltoro.kernels.dispatch import kernels_for
from baltoro.kernels.lora.rows import AdapterRows
from baltoro.kernels.norm.reference import rms_norm


class HasFactors(Protocol):
    """A and B of one adapter at one site, and the scale of their product."""

    @property
    def a(self) -> Tensor: ...

    @property
    def b(self) -> Tensor: ...

    @property
    def scale(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of all adapter slots at one site: buffers of fixed size. Filled by `lora.py`, or trained.

    a, b    [U, ..., r, in], [U, ..., out, r]; slot s lies at s - 1
    scale   [U] in the accumulate dtype
    active  slots that have factors here
    """

    a: nn.Parameter
    b: nn.Parameter
    scale: Tensor
    active: set[int] = field(default_factory=set)

    def write(self, slot: int, found: HasFactors) -> None:
        """Replace what `slot` holds, in place; what lies beyond the adapter's rank becomes zero."""
        rank = found.a.shape[-2]
        a, b = self.a.detach()[slot - 1], self.b.detach()[slot - 1]
        a[..., :rank, :].copy_(found.a)
        b[..., :rank].copy_(found.b)
        a[..., rank:, :].zero_()
        b[..., rank:].zero_()
        self.scale[slot - 1] = found.scale
        self.active.add(slot)

    def add(self, out: Tensor, x: Tensor, rows: AdapterRows) -> Tensor:
        """out [T, O], the base's product of x [T, I], with the terms of the rows' adapters."""
        return kernels_for(x.device).lora_delta(out, x, self.a, self.b, self.scale, rows, active=self.active)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., I], weight [O, I] -> [..., O], by what the dispatch table picked; a CPU has one way."""
    return kernels_for(x.device).linear(x, weight) if x.is_cuda else F.linear(x, weight)


class Linear(nn.Module):
    """x @ weight.T, and scale * B(A x) for rows that have an adapter."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.lora: Factors | None = None  # no module: the base's state_dict has no factors

    def forward(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:
        return self.add_lora(product(x, self.weight), x, rows)

    def add_lora(self, out: Tensor, x: Tensor, rows: AdapterRows | None) -> Tensor:
        """`out`, this layer's own product of x (it may come from a merged one), with the terms of adapters."""
        return out if rows is None or self.lora is None else self.lora.add(out, x, rows)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}, {self.weight.dtype}"


class RMSNorm(nn.Module):
    """Statistics in the accumulate dtype, cast to the input's, then times weight (spec 3.1)."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        norm = kernels_for(x.device).rms_norm if x.is_cuda else rms_norm
        return norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class WeightOnly(nn.Module):
    """A named `weight` and nothing else: short convolutions, whose product belongs to a kernel."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
