"""The KDA recurrence in chunks, in plain torch: prefill and training. Equal to `reference.recurrent`.

With P_i the decay from the chunk's start to token i, R_i that from i to its end (both per key channel), S entering:

    A_kk[i, j] = sum_d k_i k_j P_i/P_j, j < i;              A_qk[i, j] = sum_d q_i k_j P_i/P_j, j <= i
    (w | u)    = (I + diag(beta) A_kk)^-1 diag(beta) (k P | v);    U = u - w S
    o          = (q P) S + A_qk U;                          S+ = diag(P_C) S + (k R)' U

The quotients P_i/P_j are never formed (see `pairs`). All is batched products over chunks x heads; only S -> S+ is
serial, one small product a chunk with the transition diag(P_C) - (k R)' w. Chunk borders are absolute (see `grid`), so
the result does not depend on how a prompt is cut into spans. The backward pass is written out.
Limit: first derivatives only. Source: spec/kernels.md A.3, A.9.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baltoro.errors import ShapeError
from baltoro.kernels.kda.grid import CHUNK, Grid
from baltoro.kernels.kda.pairs import add_pair_gradients, invert_unit_lower_, pair_products
from baltoro.kernels.kda.reference import prepare
from baltoro.kernels.spans import Borders, Spans

# On a CPU heads are worked on in groups of about this many chunks x heads, to stay in its caches.
CPU_GROUP = 64


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    spans: Spans,
    state: Tensor | None,
    scale: float,
    chunk: int = CHUNK,
    is_bounded: bool = False,
    borders: Borders = (),
) -> tuple[Tensor, Tensor]:
    """Run packed spans in chunks; arguments and results as `reference.recurrent`. `chunk` is a power of two.

    borders: points inside spans, at absolute multiples of `chunk`, whose states are wanted too. They cost only a copy,
    for the states that enter chunks are made in any case.
    is_bounded: a promise that g >= -5 everywhere. Other implementations of this operation live by it; this one is
    right for any gate and does not look at it.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ShapeError(f"chunk {chunk} is not a power of two")
    q, k, v, g, beta, state = prepare(q, k, v, g, beta, spans=spans, state=state)
    grid = Grid.of(spans, chunk, borders)
    o, after = _Chunked.apply(q, k, v, g, beta, state, grid, scale)  # type: ignore[no-untyped-call]
    return o, after


class _Chunked(torch.autograd.Function):
    """Arguments and results of `chunked`, in the accumulate dtype; a loop over groups of heads."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, grid: Grid, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.grid, ctx.scale, ctx.groups = grid, scale, _groups(k, grid)
        num_states = len(state) if grid.later is None else len(state) + len(grid.later)
        o, after, saved = torch.empty_like(v), state.new_empty(num_states, *state.shape[1:]), []
        for heads in ctx.groups:
            inputs = tuple(x[:, heads] for x in (q, k, v, g, beta, state))
            o[:, heads], after[:, heads], kept = _forward(inputs, grid, scale)
            saved += kept
        ctx.save_for_backward(*saved)
        return o, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_after: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        size = len(saved) // len(ctx.groups)
        parts = []
        for n, heads in enumerate(ctx.groups):
            kept = saved[n * size : (n + 1) * size]
            parts.append(_backward(kept, d_o[:, heads], d_after[:, heads], ctx.grid, ctx.scale))
        joined = [torch.cat(part, dim=1) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)]
        return (*joined, None, None)


def _groups(k: Tensor, grid: Grid) -> list[slice]:
    heads = k.shape[1]
    size = heads if k.device.type != "cpu" else max(1, CPU_GROUP // max(1, grid.num_chunks))
    return [slice(first, min(first + size, heads)) for first in range(0, heads, size)]


def _forward(inputs: tuple[Tensor, ...], grid: Grid, scale: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """From q, k, v, g, beta, state: o [T, H, V], the states wanted [N + B, H, V, K], and what `_backward` needs.

    X = chunks x heads in the comments.
    """
    q, k, v, g, beta, state = inputs
    heads = k.shape[1]
    q, k, v, g, beta = (grid.spread(x) for x in (q * scale, k, v, g, beta.unsqueeze(-1)))  # [X, C, *]
    row = k * beta
    a_kk, a_qk, prefix, suffix = pair_products(row, q, k, g)
    inverse = invert_unit_lower_(a_kk)
    wu = torch.bmm(inverse, torch.cat((row * prefix, v * beta), -1))
    (w, u), k_out = torch.split(wu, [k.shape[-1], v.shape[-1]], -1), k * suffix
    transition = torch.bmm(w.mT, k_out).neg_()  # [X, K, K], acts from the right on [V, K]
    transition.diagonal(dim1=1, dim2=2).add_(prefix[:, -1])
    entering, leaving = _scan(transition, torch.bmm(u.mT, k_out), grid.sort(state), grid, heads)
    fixed = torch.baddbmm(u, w, entering.mT, alpha=-1)  # U
    o = torch.bmm(q * prefix, entering.mT).baddbmm_(a_qk, fixed)
    kept = [row, q, k, v, g, beta, a_qk, prefix, suffix, inverse, wu, transition, entering, fixed]
    return grid.gather(o, heads), grid.add_borders(grid.unsort(leaving, heads), entering), kept


def _backward(
    kept: tuple[Tensor, ...], d_o: Tensor, d_after: Tensor, grid: Grid, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta and the entering state."""
    row, q, k, v, g, beta, a_qk, prefix, suffix, inverse, wu, transition, entering, fixed = kept
    heads, widths = d_o.shape[1], [k.shape[-1], v.shape[-1]]
    d_o = grid.spread(d_o)
    d_qk = torch.bmm(d_o, fixed.mT)
    d_fixed = torch.bmm(a_qk.mT, d_o)
    d_entering = torch.bmm(d_o.mT, q * prefix).baddbmm_(d_fixed.mT, wu[..., : widths[0]], alpha=-1)
    d_final = grid.take_borders(d_after, d_entering)
    d_leaving, d_state = _scan_back(transition, d_entering, grid.sort(d_final), grid, heads)
    d_fixed.baddbmm_(k * suffix, d_leaving.mT)
    # wu = inverse (row P | beta v) with inverse = (I + A_kk)^-1
    d_rhs = torch.bmm(inverse.mT, torch.cat((torch.bmm(d_fixed, entering).neg_(), d_fixed), -1))
    d_kk = torch.bmm(d_rhs, wu.mT).neg_()
    d_in, d_v = torch.split(d_rhs, widths, -1)

    d_out = torch.bmm(fixed, d_leaving).mul_(suffix)  # of k, through k R
    d_q, d_row, d_k = torch.bmm(d_o, entering).mul_(prefix), d_in * prefix, d_out.clone()
    add_pair_gradients((row, q, k, g), d_kk, d_qk, d_row=d_row, d_q=d_q, d_column=d_k)
    # of the log-decay summed up to each token, then of each token's own
    d_total = (q * d_q).addcmul_(row, d_row).addcmul_(k, d_k, value=-1)
    d_total[:, -1] += (k * d_out).sum(1) + prefix[:, -1] * (entering * d_leaving).sum(1)
    d_g = d_total.flip(1).cumsum(1).flip(1)

    d_beta = (d_row * k).sum(-1, keepdim=True) + (d_v * v).sum(-1, keepdim=True)
    found = (d_q.mul_(scale), d_k.addcmul_(d_row, beta), d_v * beta, d_g, d_beta)
    d_q, d_k, d_v, d_g, d_beta = (grid.gather(x, heads) for x in found)
    return d_q, d_k, d_v, d_g, d_beta.squeeze(-1), grid.unsort(d_state, heads)


def _scan(transition: Tensor, addition: Tensor, state: Tensor, grid: Grid, heads: int) -> tuple[Tensor, Tensor]:
    """S+ = S transition + addition over the chunks of every span; overwrites `state`.

    Returns the states entering each chunk [X, V, K] and those after the spans, in the order of the steps.
    """
    entering = torch.empty_like(addition)
    for running, chunks in grid.slices(heads):
        entering[chunks] = state[:running]
        torch.baddbmm(addition[chunks], entering[chunks], transition[chunks], out=state[:running])
    return entering, state


def _scan_back(
    transition: Tensor, d_entering: Tensor, d_state: Tensor, grid: Grid, heads: int
) -> tuple[Tensor, Tensor]:
    """`_scan` from its end. `d_entering`: what each chunk's own outputs want of the state entering it; `d_state`: the
    gradients of the states after the spans, overwritten.

    Returns the gradients of the state leaving each chunk [X, V, K] and of the first states, in the order of the steps.
    """
    d_leaving = torch.empty_like(d_entering)
    for running, chunks in reversed(grid.slices(heads)):
        d_leaving[chunks] = d_state[:running]
        torch.baddbmm(d_entering[chunks], d_leaving[chunks], transition[chunks].mT, out=d_state[:running])
    return d_leaving, d_state
