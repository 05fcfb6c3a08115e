"""The expert product grouped on the device: sort, three grouped matrix products, no word to the host.

In and out: as `experts.expert_product`. For bf16 dense weights on a GPU with grouped matrix products (Hopper on);
packed weights, other dtypes and few pairs go to the plain forms. Rows move by gathers, gradients too: a result does not
change from run to run.
Source: spec/k3.md 3.7, spec/kernels.md E.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.moe import experts as plain
from baltoro.kernels.moe.experts import Activation
from baltoro.kernels.moe.products import AnyExperts, Weight, scatter
from baltoro.kernels.quant import mxfp4, mxfp8


def expert_product(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: AnyExperts,
    *,
    activation: Activation,
    fake_weights: bool = False,
    fake_activations: bool = False,
) -> Tensor:
    """z [T, M], ids int64 [T, A], weights [T, A] -> [T, M] in z.dtype."""
    dense = (experts.w1, experts.w3, experts.w2)
    is_plain = z.dtype != torch.bfloat16 or ids.numel() <= plain.MAX_GATHERED_PAIRS
    if is_plain or not all(isinstance(w, Tensor) for w in dense):
        return plain.expert_product(
            z,
            ids,
            weights,
            experts,
            activation=activation,
            fake_weights=fake_weights,
            fake_activations=fake_activations,
        )
    w1, w3, w2 = (_stack(w, fake_weights, z.dtype) for w in dense)
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=z.device))
    ends = torch.searchsorted(flat[order], torch.arange(w1.shape[0], device=z.device), right=True, out_int32=True)
    pairs = scatter(mxfp8.fake(z) if fake_activations else z, order, place, ids.shape[1])
    gate = torch._grouped_mm(pairs, w1.transpose(1, 2), offs=ends)
    up = torch._grouped_mm(pairs, w3.transpose(1, 2), offs=ends)
    hidden = activation(gate, up)
    out = torch._grouped_mm(mxfp8.fake(hidden) if fake_activations else hidden, w2.transpose(1, 2), offs=ends)
    return plain.combine(scatter(out, place, order, 1), weights, z).to(z.dtype)


def _stack(weight: Weight, is_faked: bool, dtype: torch.dtype) -> Tensor:
    assert isinstance(weight, Tensor)
    return (mxfp4.fake(weight) if is_faked else weight).to(dtype)
