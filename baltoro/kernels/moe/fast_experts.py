"""The product of packed MXFP4 experts in Triton: pair by pair for decode, grouped on the device for prefill.

In and out: as `experts.expert_product`; the experts in tiles (permute.py): the fast way, in tile_experts.py; or in the
published order: a fallback that needs no copy of the weights and takes every scale up to 2^113. There products and sums
are in fp32; between the two products decode keeps fp32, prefill rounds to z.dtype. W4A8 (`fake_activations`) rounds the
inputs of both products to MXFP8; the arithmetic stays that of z.dtype.
Dense experts, other dtypes, gradients and activations that no kernel knows go to `device_grouped`.
Source: spec/k3.md 3.7, spec/kernels.md E.4, E.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baltoro.kernels.moe import device_grouped, tile_experts
from baltoro.kernels.moe.experts import Activation
from baltoro.kernels.moe.products import AnyExperts, ExpertWeights, Packed, TiledExperts
from baltoro.kernels.moe.reference import silu_glu, situ_glu
from baltoro.kernels.moe.tiles import tile_table
from baltoro.kernels.quant import mxfp8

# Pairs up to which each reads its expert's weights by itself. On an H200 (2026-11-30) 64 pairs of 112 experts took
# 328 us so, 269 us grouped.
MAX_PAIRS = 16
SILU, SITU, SITU_LINEAR = 0, 1, 2


@dataclass(frozen=True, slots=True)
class KnownActivation:
    """An activation as the kernels' epilogue takes it."""

    kind: int
    beta: float = 1.0
    linear_beta: float = 1.0


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
    known = known_activation(activation)
    is_ours = known is not None and z.dtype in (torch.bfloat16, torch.float32)
    is_ours = is_ours and not (torch.is_grad_enabled() and (z.requires_grad or weights.requires_grad))
    packed = experts.order == "tiled" or all(isinstance(w, Packed) for w in (experts.w1, experts.w3, experts.w2))
    if known is not None and is_ours and packed:
        form = of_pairs if ids.numel() <= MAX_PAIRS else of_groups
        return form(z, ids, weights, experts, known, fake_activations=fake_activations)
    return device_grouped.expert_product(
        z,
        ids,
        weights,
        experts,
        activation=activation,
        fake_weights=fake_weights,
        fake_activations=fake_activations,
    )


def known_activation(activation: Activation) -> KnownActivation | None:
    """The kernels' form of `silu_glu` and of `partial(situ_glu, beta=, linear_beta=)`; None for anything else."""
    if activation is silu_glu:
        return KnownActivation(SILU)
    if not isinstance(activation, partial) or activation.func is not situ_glu or activation.args:
        return None
    if activation.keywords.keys() != {"beta", "linear_beta"}:
        return None
    beta, linear_beta = activation.keywords["beta"], activation.keywords["linear_beta"]
    if linear_beta is None:
        return KnownActivation(SITU_LINEAR, float(beta))
    return KnownActivation(SITU, float(beta), float(linear_beta))


def of_pairs(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: AnyExperts,
    known: KnownActivation,
    *,
    fake_activations: bool = False,
) -> Tensor:
    """Two launches: hidden of each pair, then each token's weighted sum. No sort, no padding, no atomics."""
    from triton import cdiv, next_power_of_2

    from baltoro.kernels.moe import expert_kernels as kernels

    if isinstance(experts, TiledExperts):
        return _permuted(z, ids, weights, experts, known, fake_activations=fake_activations, is_pairs=True)
    w1, w3, w2 = _matrices(experts)
    num_hidden, width = w1.packed.shape[1], w2.packed.shape[1]
    hidden = torch.empty(ids.numel(), num_hidden, dtype=torch.float32, device=z.device)
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if not ids.numel():
        return out.zero_()
    z = (mxfp8.fake(z) if fake_activations else z).contiguous()
    ids, block_n, activation = ids.contiguous(), 8, (known.beta, known.linear_beta)
    kernels.first_of_pairs[(ids.numel(), cdiv(num_hidden, block_n))](
        z, ids, w1.packed, w1.scale, w3.packed, w3.scale, hidden, ids.shape[1], num_hidden, width, *activation,
        KIND=known.kind, BLOCK_N=block_n, BLOCKS=min(16, next_power_of_2(width // 32)),
        num_warps=4,
    )  # fmt: skip
    hidden = mxfp8.fake(hidden) if fake_activations else hidden
    kernels.second_of_tokens[(len(z), cdiv(width, block_n))](
        hidden, ids, weights.float().contiguous(), w2.packed, w2.scale, out, ids.shape[1], num_hidden, width,
        BLOCK_N=block_n, BLOCKS=min(16, next_power_of_2(num_hidden // 32)), num_warps=4,
    )  # fmt: skip
    return out


def of_groups(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: AnyExperts,
    known: KnownActivation,
    *,
    fake_activations: bool = False,
) -> Tensor:
    """Pairs sorted by expert; each tile of rows meets its expert's weights, dequantised on the way to the product."""
    from triton import cdiv, knobs, next_power_of_2

    from baltoro.kernels.moe import expert_kernels as kernels
    from baltoro.kernels.moe import tile_moves

    if isinstance(experts, TiledExperts):
        return _permuted(z, ids, weights, experts, known, fake_activations=fake_activations, is_pairs=False)
    w1, w3, w2 = _matrices(experts)
    num_experts, num_hidden, width = len(w1.packed), w1.packed.shape[1], w2.packed.shape[1]
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if not ids.numel():
        return out.zero_()
    block_m, block_n = (16 if ids.numel() <= 16 * num_experts else 64), 64
    order, tiles = tile_table(ids, num_experts, block_m)
    shape = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 32}
    shape |= {"INTERPRET": knobs.runtime.interpret, "num_warps": 4, "num_stages": 3}
    hidden = torch.empty(ids.numel(), num_hidden, dtype=z.dtype, device=z.device)
    z = (mxfp8.fake(z) if fake_activations else z).contiguous()
    kernels.first_of_groups[(tiles.shape[1], cdiv(num_hidden, block_n))](
        z, order, tiles, w1.packed, w1.scale, w3.packed, w3.scale, hidden,
        num_experts, ids.shape[1], num_hidden, width, known.beta, known.linear_beta, KIND=known.kind, **shape,
    )  # fmt: skip
    hidden = mxfp8.fake(hidden) if fake_activations else hidden
    parts = torch.empty(ids.numel(), width, dtype=z.dtype, device=z.device)
    kernels.second_of_groups[(tiles.shape[1], cdiv(width, block_n))](
        hidden, order, tiles, w2.packed, w2.scale, parts, num_experts, num_hidden, width, **shape
    )
    tile_moves.combine[(len(z), cdiv(width, 256))](
        parts, weights.float().contiguous(), out, ids.shape[1], width,
        PARTS=next_power_of_2(ids.shape[1]), BLOCK=256, num_warps=4,
    )  # fmt: skip
    return out


def _permuted(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: TiledExperts,
    known: KnownActivation,
    *,
    fake_activations: bool,
    is_pairs: bool,
) -> Tensor:
    plan = tile_experts.plan_for(ids.numel(), len(experts.first.packed), z.dtype, is_pairs=is_pairs)
    activation = known.kind, known.beta, known.linear_beta
    return tile_experts.run(
        z, ids, weights, experts, activation, plan, is_pairs=is_pairs, fake_activations=fake_activations
    )


def _matrices(experts: ExpertWeights) -> tuple[Packed, Packed, Packed]:
    """w1, w3, w2. Packed experts only."""
    w1, w3, w2 = (w for w in (experts.w1, experts.w3, experts.w2) if isinstance(w, Packed))
    return w1, w3, w2
