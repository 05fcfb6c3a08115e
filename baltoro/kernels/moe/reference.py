"""Routing with a selection bias, and the gated activations of the experts, in plain torch.

Source: spec/k3.md 3.6 and 3.7 steps 1-4.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from baltoro.kernels.precision import acc_dtype


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
    weights = scores.gather(-1, ids)
    if top_k > 1 and is_renormalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling


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
    result: Tensor = _SituGlu.apply(gate, up, beta, linear_beta)  # type: ignore[no-untyped-call]
    return result


class _SituGlu(torch.autograd.Function):
    """Written out because autograd would keep twice as many tensors of the experts' widest activation."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        acc = acc_dtype(gate.dtype)
        wide = gate.to(acc)
        bent, share = torch.tanh(wide / beta), torch.sigmoid(wide)
        linear = up.to(acc) if linear_beta is None else torch.tanh(up.to(acc) / linear_beta)
        ctx.save_for_backward(bent, share, linear)
        ctx.betas, ctx.dtypes = (beta, linear_beta), (gate.dtype, up.dtype)
        return (bent * share).mul_(linear).mul_(beta * (linear_beta or 1.0)).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bent, share, linear = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        grad = grad.to(bent.dtype)
        # d(beta tanh(x/beta) s) = s (1 - tanh^2) + beta tanh s (1 - s), s = sigmoid(x)
        slope = torch.addcmul(1 - bent * bent, bent, 1 - share, value=beta).mul_(share)
        d_gate = slope.mul_(grad).mul_(linear)
        d_up = (bent * share).mul_(grad)
        if linear_beta is None:
            d_up.mul_(beta)
        else:
            d_gate.mul_(linear_beta)
            d_up.addcmul_(d_up * linear, linear, value=-1).mul_(beta)
        return d_gate.to(ctx.dtypes[0]), d_up.to(ctx.dtypes[1]), None, None


def silu_glu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the input dtype."""
    return F.silu(gate) * up
