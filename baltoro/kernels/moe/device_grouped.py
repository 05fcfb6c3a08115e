"""The expert product grouped on the device: sort, three grouped matrix products, no word to the host.

In and out: as `experts.expert_product`. For bf16 dense weights on a GPU with grouped matrix products (Hopper on);
packed weights, other dtypes and few pairs go to the plain forms.
Source: spec/k3.md 3.7, spec/kernels.md E.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baltoro.kernels.moe import experts as plain
from baltoro.kernels.moe.experts import Activation, ExpertWeights, Packed
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.quant import mxfp4, mxfp8


def expert_product(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    activation: Activation,
    fake_weights: bool = False,
    fake_activations: bool = False,
) -> Tensor:
    """z [T, M], ids int64 [T, A], weights [T, A] -> [T, M] in z.dtype."""
    dense = (experts.w1, experts.w3, experts.w2)
    is_plain = z.dtype != torch.bfloat16 or ids.numel() <= plain.MAX_GATHERED_PAIRS
    if is_plain or any(isinstance(w, Packed) for w in dense):
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
    tokens = order // ids.shape[1]
    counts = torch.zeros(w1.shape[0], dtype=torch.int32, device=z.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = (mxfp8.fake(z) if fake_activations else z)[tokens]
    gate = torch._grouped_mm(rows, w1.transpose(1, 2), offs=ends)
    up = torch._grouped_mm(rows, w3.transpose(1, 2), offs=ends)
    hidden = activation(gate, up)
    out = torch._grouped_mm(mxfp8.fake(hidden) if fake_activations else hidden, w2.transpose(1, 2), offs=ends)
    acc = acc_dtype(z.dtype)
    weighted = out.to(acc) * weights.to(acc).flatten()[order].unsqueeze(-1)
    return torch.zeros(z.shape, dtype=acc, device=z.device).index_add(0, tokens, weighted).to(z.dtype)


def _stack(weight: Tensor | Packed, is_faked: bool, dtype: torch.dtype) -> Tensor:
    assert isinstance(weight, Tensor)
    return (mxfp4.fake(weight) if is_faked else weight).to(dtype)
