"""The product of the chosen experts, in plain torch: y[t] = sum_a weights[t, a] * expert_{ids[t, a]}(z[t]).

    expert(z) = w2 activation(w1 z, w3 z)

Weights are dense [E, out, in], or packed MXFP4, published order or tiles, that is dequantised on use, a few experts at
a time, and never written.
Product with the routing weight and the sum over experts in the accumulate dtype, in the order of `ids`, rounded once:
a token's result does not depend on who else is in the batch beyond the rounding of matrix products. Forms of the
same: token-centric (gather the weights of each pair), one token alone, grouped by expert (prefill, training), and every
token through every expert (a batched decode that hits most of a few small experts anyway: three products, not many).
Source: spec/k3.md 3.7 steps 6 and 7, spec/kernels.md E.4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baltoro.kernels.lora.experts import ExpertDelta
from baltoro.kernels.moe.products import AnyExperts, Weight, grouped_linear, scatter
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.quant import mxfp8

Activation = Callable[[Tensor, Tensor], Tensor]

# On a GPU, up to this many (token, expert) pairs the weights are gathered per pair: nothing is read on the host.
MAX_GATHERED_PAIRS = 32
# On a CPU every token goes through every expert where all their elements of one matrix are at most so many, and a token
# picks at least one in MAX_WASTE: there the time goes into starting products, not into doing them. Shortest times in
# us, one thread, 2026-11-30, single / everywhere / grouped: 16 experts of 64 x 64, one token 68 / 82 / 167, 8 tokens
# - / 139 / 364; 32 of 96 x 128, one token 77 / 321 / 189, 8 tokens - / 619 / 525. Gathering copies the weights: 1192.
MAX_EVERYWHERE, MAX_WASTE = 1 << 17, 8
# Elements that one matrix of all experts, and one of its products with all tokens, may have on a GPU where `grouped`
# would have a word with the host, which a captured step may not: what nobody reads is computed too (`can_be_fixed`).
MAX_FIXED = 1 << 26


def expert_product(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: AnyExperts,
    *,
    activation: Activation,
    fake_weights: bool = False,
    fake_activations: bool = False,
    delta: ExpertDelta | None = None,
) -> Tensor:
    """z [T, M], ids int64 [T, A], weights [T, A] -> [T, M] in z.dtype.

    fake_weights: dense weights pass through MXFP4 fake quantisation. fake_activations: the inputs of both products pass
    through MXFP8 fake quantisation. Gradients are straight-through. `delta`: terms of adapters, which read the inputs
    of both products unquantised.
    """
    experts = experts.fake() if fake_weights else experts
    # others than `grouped` would keep matrices of the base for backward
    is_fixed = delta is not None and delta.is_fixed
    form = grouped if torch.is_grad_enabled() and not is_fixed else _form(ids, experts, delta)
    return form(z, ids, weights, experts, activation=activation, fake_activations=fake_activations, delta=delta)


def gathered(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: AnyExperts,
    *,
    activation: Activation,
    fake_activations: bool = False,
    delta: ExpertDelta | None = None,
) -> Tensor:
    """`expert_product` pair by pair: no sort, but each pair reads its expert's weights."""
    w1, w3, w2 = experts.take(ids.flatten(), z.dtype)
    pairs = (mxfp8.fake(z) if fake_activations else z).repeat_interleave(ids.shape[1], 0).unsqueeze(-1)
    gate, up = (w1 @ pairs).squeeze(-1), (w3 @ pairs).squeeze(-1)
    if delta is not None:
        tokens = torch.arange(len(z), device=z.device).repeat_interleave(ids.shape[1])
        gate, up = delta.add_first(gate, up, z, tokens, ids.flatten())
    hidden = activation(gate, up)
    total = combine(w2 @ (mxfp8.fake(hidden) if fake_activations else hidden).unsqueeze(-1), weights, z)
    if delta is not None:
        total = delta.add_second(total, hidden, weights.flatten(), tokens, ids.flatten())
    return total.to(z.dtype)


def single(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: AnyExperts,
    *,
    activation: Activation,
    fake_activations: bool = False,
    delta: ExpertDelta | None = None,
) -> Tensor:
    """`expert_product` of one token with dense weights: a matrix-vector product for each matrix that it needs."""
    w1, w3, w2 = (weight.to(z.dtype) for weight in (experts.w1, experts.w3, experts.w2) if isinstance(weight, Tensor))
    picked, row = ids[0].tolist(), (mxfp8.fake(z) if fake_activations else z)[0]
    gate, up = z.new_empty(2, len(picked), w1.shape[1]).unbind(0)
    for place, expert in enumerate(picked):
        torch.mv(w1[expert], row, out=gate[place])
        torch.mv(w3[expert], row, out=up[place])
    tokens = torch.zeros_like(ids[0])
    if delta is not None:
        gate, up = delta.add_first(gate, up, z, tokens, ids[0])
    hidden = activation(gate, up)
    out, rows = z.new_empty(len(picked), z.shape[1]), mxfp8.fake(hidden) if fake_activations else hidden
    for place, expert in enumerate(picked):
        torch.mv(w2[expert], rows[place], out=out[place])
    total = combine(out, weights, z)
    if delta is not None:
        total = delta.add_second(total, hidden, weights.flatten(), tokens, ids[0])
    return total.to(z.dtype)


def grouped(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: AnyExperts,
    *,
    activation: Activation,
    fake_activations: bool = False,
    delta: ExpertDelta | None = None,
) -> Tensor:
    """`expert_product` expert by expert: pairs sorted by expert, each hit expert's weights read once."""
    order = torch.argsort(ids.flatten(), stable=True)
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    sorted_ids = ids.flatten()[order]
    hit, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    groups = list(zip(hit.tolist(), counts.tolist(), strict=True))
    pairs = scatter(mxfp8.fake(z) if fake_activations else z, order, place, ids.shape[1])
    gate, up = grouped_linear(pairs, experts.w1, groups), grouped_linear(pairs, experts.w3, groups)
    if delta is not None:
        tokens = order // ids.shape[1]
        gate, up = delta.add_first(gate, up, z, tokens, sorted_ids)
    hidden = activation(gate, up)
    out = grouped_linear(mxfp8.fake(hidden) if fake_activations else hidden, experts.w2, groups)
    total = combine(scatter(out, place, order, 1), weights, z)
    if delta is not None:
        total = delta.add_second(total, hidden, weights.flatten()[order], tokens, sorted_ids)
    return total.to(z.dtype)


def everywhere(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: AnyExperts,
    *,
    activation: Activation,
    fake_activations: bool = False,
    delta: ExpertDelta | None = None,
) -> Tensor:
    """`expert_product` for few and small experts: all of them work on all tokens, and each token picks its own."""
    w1, w3, w2 = (_all(weight, z.dtype) for weight in (experts.w1, experts.w3, experts.w2))
    rows = (mxfp8.fake(z) if fake_activations else z).expand(len(w1), *z.shape)
    gate, up = torch.bmm(rows, w1.mT), torch.bmm(rows, w3.mT)  # [E, T, F]
    tokens = torch.arange(ids.numel(), device=z.device) // ids.shape[1]
    pairs = ids.flatten(), tokens
    if delta is not None:  # of the pairs that were picked; others are thrown away below
        picked = delta.add_first(gate[pairs], up[pairs], z, tokens, ids.flatten())
        gate, up = gate.index_put(pairs, picked[0]), up.index_put(pairs, picked[1])
    hidden = activation(gate, up)
    out = torch.bmm(mxfp8.fake(hidden) if fake_activations else hidden, w2.mT)  # [E, T, M]
    total = combine(out[pairs], weights, z)
    if delta is not None:
        total = delta.add_second(total, hidden[pairs], weights.flatten(), tokens, ids.flatten())
    return total.to(z.dtype)


def _all(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Every expert's matrix [E, out, in]; dense ones are not copied."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dense(slice(None), dtype)


def can_be_fixed(experts: AnyExperts, num_tokens: int) -> bool:
    """Whether so many tokens go through all experts in reasonable memory: then a step with dense experts, or with terms
    of adapters in fixed form, asks the host for nothing."""
    count, inner, width = experts.w1.shape
    return count * max(inner * width, num_tokens * max(inner, width)) <= MAX_FIXED


def _form(ids: Tensor, experts: AnyExperts, delta: ExpertDelta | None = None) -> Callable[..., Tensor]:
    """The form that takes least time without gradients."""
    if delta is not None and delta.is_fixed:
        return everywhere
    if not ids.is_cpu:
        if ids.numel() <= MAX_GATHERED_PAIRS:
            return gathered
        return everywhere if can_be_fixed(experts, len(ids)) else grouped
    if len(ids) == 1 and isinstance(experts.w1, Tensor):
        return single
    num_experts, rows, columns = experts.w1.shape
    is_small = num_experts * rows * columns <= MAX_EVERYWHERE and num_experts <= MAX_WASTE * ids.shape[1]
    return everywhere if is_small else grouped


def combine(out: Tensor, weights: Tensor, z: Tensor) -> Tensor:
    """Weighted sum over the experts of each token: out [T * A, M, ...] -> [T, M], in the accumulate dtype."""
    acc = acc_dtype(z.dtype)
    return (out.view(*weights.shape, -1).to(acc) * weights.to(acc).unsqueeze(-1)).sum(1)
