"""Gated MLP: the dense first layer and the shared experts. SiTU-GLU or SiLU, by the config.

In: x [T, D]. Out: [T, D]. Source: spec/k3.md 3.6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from baltoro.kernels.dispatch import kernels_for
from baltoro.kernels.lora.rows import AdapterRows
from baltoro.kernels.moe.reference import silu_glu, situ_glu
from baltoro.model.config import K3Config
from baltoro.model.linear import Linear, product
from baltoro.model.merged import add_loras, merge_rows

Activation = Callable[[Tensor, Tensor], Tensor]


def activation_of(config: K3Config) -> Activation:
    """(gate, up) -> hidden, in the input dtype."""
    if config.hidden_act == "silu":
        return silu_glu
    return partial(situ_glu, beta=config.situ_beta, linear_beta=config.situ_linear_beta)


def activate(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """`activation` of the two halves [T, F], on a GPU by what the dispatch table picked for it."""
    if not gate.is_cuda:
        return activation(gate, up)
    kernels = kernels_for(gate.device)
    if isinstance(activation, partial) and activation.func is situ_glu:
        return kernels.situ_glu(gate, up, **activation.keywords)
    return kernels.silu_glu(gate, up) if activation is silu_glu else activation(gate, up)


class MLP(nn.Module):
    """down(act(gate(x), up(x)))."""

    def __init__(self, config: K3Config, intermediate: int, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.activation = activation_of(config)
        self.gate_proj = Linear(config.hidden_size, intermediate, dtype=dtype, device=device)
        self.up_proj = Linear(config.hidden_size, intermediate, dtype=dtype, device=device)
        self.down_proj = Linear(intermediate, config.hidden_size, dtype=dtype, device=device)
        self._merged: Tensor | None = None

    def merge(self, *, may_copy: bool = True) -> None:
        """Prepare for inference: gate and up in one product."""
        self._merged = merge_rows([self.gate_proj, self.up_proj], may_copy=may_copy)

    def forward(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:
        if self._merged is None:
            return self.finish(self.gate_proj(x, rows), self.up_proj(x, rows), rows)
        merged = add_loras(product(x, self._merged), (self.gate_proj, self.up_proj), x, rows)
        gate, up = merged.chunk(2, dim=-1)
        return self.finish(gate, up, rows)

    def finish(self, gate: Tensor, up: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """From the two projections on."""
        return self.down_proj(activate(self.activation, gate, up), rows)  # type: ignore[no-any-return]
