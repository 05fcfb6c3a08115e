"""Routing with a selection bias, and the gated activations of the experts, in plain torch.

Source: spec/k3.md 3.6 and 3.7 steps 1-4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from baltoro.kernels.precision import acc_dtype

CPU_TILE = 1 << 15  # elements


def route(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    activation: Literal["sigmoid", "softmax"],
    is_renormalised: bool,
    scaling: float,
    num_groups: int = 1,
    num_top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose top_k of E experts per token by score + bias; weigh them by score alone.

    logits [T, E] and bias [E] in the accumulate dtype. With several groups only the num_top_groups groups whose two
    best choices sum highest take part. Ties go to the lowest expert. Returns ids [T, A] int64, best choice first, and
    weights [T, A]; gradients flow through the weights only.
    """
    scores = torch.sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, dim=-1)
    choice = scores.detach() + bias.detach()
    if num_groups > num_top_groups:
        choice = _keep_best_groups(choice, num_groups, num_top_groups)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]
    return ids, _weights(scores, ids, is_renormalised=is_renormalised, scaling=scaling)


def weigh(
    logits: Tensor,
    ids: Tensor,
    *,
    activation: Literal["sigmoid", "softmax"],
    is_renormalised: bool,
    scaling: float,
) -> Tensor:
    """The weights [T, A] that `route` gives to `ids` [T, A] where it chooses them; gradients flow into the logits."""
    scores = torch.sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, dim=-1)
    return _weights(scores, ids, is_renormalised=is_renormalised, scaling=scaling)


def _weights(scores: Tensor, ids: Tensor, *, is_renormalised: bool, scaling: float) -> Tensor:
    weights = scores.gather(-1, ids)
    if ids.shape[-1] > 1 and is_renormalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling


def _keep_best_groups(choice: Tensor, num_groups: int, num_top_groups: int) -> Tensor:
    grouped = torch.unflatten(choice, -1, (num_groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, :num_top_groups]
    is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, kept, True)
    return grouped.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(-2)


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta); `up` itself if linear_beta is None.

    In the accumulate dtype, rounded once to gate.dtype. Bounded by beta * linear_beta.
    """
    if torch.is_grad_enabled():
        result: Tensor = _SituGlu.apply(gate, up, beta, linear_beta)  # type: ignore[no-untyped-call]
        return result
    return _situ(gate, up, beta, linear_beta)


class _SituGlu(torch.autograd.Function):
    """Written out to keep nothing but its inputs: it works on the experts' widest activation. Inputs of one shape.

    On a CPU it goes tile by tile, so that what lies between stays in cache.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        out = torch.empty_like(gate)
        for into, gate_tile, up_tile in _tiles(out, gate, up):
            into.copy_(_situ(gate_tile, up_tile, beta, linear_beta))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        for into_gate, into_up, grad_tile, gate_tile, up_tile in _tiles(d_gate, d_up, grad.contiguous(), gate, up):
            bent, share, linear = _situ_parts(gate_tile, up_tile, beta, linear_beta)
            both = bent * share
            outer = both * grad_tile.mul(beta)
            # d(tanh(x/beta) beta s) = s (1 - tanh^2) + beta tanh s (1 - s), s = sigmoid(x)
            slope = torch.addcmul(share, both, bent, value=-1).add_(both.mul_(1 - share), alpha=beta)
            slope.mul_(linear).mul_(grad_tile)
            if linear_beta is not None:
                slope.mul_(linear_beta)
                outer.addcmul_(outer * linear, linear, value=-1)
            into_gate.copy_(slope)
            into_up.copy_(outer)
        return d_gate, d_up, None, None


def _situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    bent, share, linear = _situ_parts(gate, up, beta, linear_beta)
    return bent.mul_(share).mul_(linear).mul_(beta * (linear_beta or 1.0)).to(gate.dtype)


def _situ_parts(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """tanh(gate/beta), sigmoid(gate), tanh(up/linear_beta) or up, in the accumulate dtype."""
    acc = acc_dtype(gate.dtype)
    wide, linear = gate.to(acc), up.to(acc)
    linear = linear if linear_beta is None else (linear / linear_beta).tanh_()
    return (wide / beta).tanh_(), torch.sigmoid(wide), linear


def _tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Contiguous tensors of one shape, flattened, in pieces of CPU_TILE elements; elsewhere as one piece."""
    size = CPU_TILE if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    return zip(*(torch.split(x.view(-1), size) for x in tensors), strict=True)


def silu_glu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the input dtype."""
    return F.silu(gate) * up
