"""Routing in one launch (Triton): scores, top A of E with the bias, renormalisation, and how often each was picked.

In and out: as `reference.route`, ties and order too. fp32 without gradients and without groups; anything else goes to
the reference. Source: spec/k3.md 3.7, spec/kernels.md E.3.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from baltoro.kernels.device import HOPPER, has_dependent_launch, machine
from baltoro.kernels.moe import reference

# Experts of one group: 4 a lane of a warp, what one load of 16 bytes brings.
WIDTH = 128
MAX_WARPS = 16
SLOTS = 16
"""Of a group in the Hopper form, which takes more than half as many picks, and from 2 to 16 groups."""


def choose_wide(num_tokens: int) -> int:
    """Experts a thread of the Hopper form (`gluon_route.py`); a warp has 32 as many. Fewer are a shorter chain, more
    are fewer candidates to be ranked. With 4 / 8 / 16: one token 2.5 / 3.0 / 5.3 us (3.7 in Triton), 256 tokens 5.5 /
    5.2 / 6.9 (6.4), 8192 tokens 91 / 65 / 56 (134)."""
    return 4 if num_tokens <= 132 else 8 if num_tokens <= 1024 else 16


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
    """logits [T, E], bias [E] -> ids int64 [T, A], best choice first, and weights [T, A]."""
    has_gradient = torch.is_grad_enabled() and logits.requires_grad
    if has_gradient or logits.dtype != torch.float32 or num_groups > num_top_groups:
        return reference.route(
            logits,
            bias,
            top_k=top_k,
            activation=activation,
            is_renormalised=is_renormalised,
            scaling=scaling,
            num_groups=num_groups,
            num_top_groups=num_top_groups,
        )
    options: dict[str, Any] = {"is_renormalised": is_renormalised, "scaling": scaling}
    return select(logits, bias, None, top_k=top_k, activation=activation, **options)


def select(
    logits: Tensor, bias: Tensor, counts: Tensor | None, *, top_k: int, activation: str, **options: Any
) -> tuple[Tensor, Tensor]:
    """As `route`, in fp32; adds the number of picks of each expert to `counts`, int32 [E], where given."""
    from triton import cdiv, next_power_of_2

    from baltoro.kernels.moe import route_kernels

    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens and activation == "sigmoid" and (groups := _groups(logits, top_k)):
        _select_on_hopper(logits, bias, counts, ids, weights, groups, **options)
        return ids, weights
    width = max(WIDTH, next_power_of_2(top_k))
    groups = next_power_of_2(cdiv(num_experts, width))
    is_dependent = has_dependent_launch(logits)
    launch = {"launch_pdl": True} if is_dependent else {}
    if num_tokens:
        route_kernels.select[(num_tokens,)](
            logits.contiguous(),
            bias.float().contiguous(),
            ids,
            weights,
            ids if counts is None else counts,
            num_experts,
            float(options["scaling"]),
            TOP=top_k,
            TOP_BLOCK=next_power_of_2(top_k),
            SLOTS=max(32, next_power_of_2(top_k)),
            GROUPS=groups,
            WIDTH=width,
            IS_SIGMOID=activation == "sigmoid",
            IS_RENORMALISED=bool(options["is_renormalised"]) and top_k > 1,
            HAS_COUNTS=counts is not None,
            PDL=is_dependent,
            num_warps=min(groups, MAX_WARPS),
            **launch,
        )
    return ids, weights


def _groups(logits: Tensor, top_k: int) -> int:
    """Groups of the Hopper form; 0 where it does not fit."""
    if machine(logits.device.type, logits.device.index or 0).capability not in HOPPER:
        return 0
    groups = 1 << (-(-logits.shape[1] // (32 * choose_wide(len(logits)))) - 1).bit_length()
    return groups if 2 <= groups <= 16 and SLOTS < 2 * top_k <= 2 * SLOTS else 0


def _select_on_hopper(
    logits: Tensor, bias: Tensor, counts: Tensor | None, ids: Tensor, weights: Tensor, groups: int, **options: Any
) -> None:
    """`select` into ids and weights."""
    from baltoro.kernels.moe import gluon_route

    (num_tokens, num_experts), top_k = logits.shape, ids.shape[1]
    wide = choose_wide(num_tokens)
    experts, pairs = gluon_route.layouts(groups, SLOTS, wide)
    gluon_route.select_kernel[(num_tokens,)](
        logits.contiguous(), bias.float().contiguous(), ids, weights, ids if counts is None else counts,
        num_experts, float(options["scaling"]),
        TOP=top_k, SLOTS=SLOTS, GROUPS=groups, WIDE=wide, EXPERTS=experts, PAIRS=pairs,
        IS_RENORMALISED=bool(options["is_renormalised"]) and top_k > 1, HAS_COUNTS=counts is not None,
        PDL=True,
        num_warps=groups, launch_pdl=True,
    )  # fmt: skip
