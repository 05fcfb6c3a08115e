"""The grouped product of tiled experts with slabs of inputs (slab_text.py): each expert's rows in one tile, or in even
ones, and a program for exactly as many, rounded up to eight. For bf16 on Hopper; widths that 8 divides.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from baltoro.kernels.moe import slab_end_text, slab_text
from baltoro.kernels.moe.products import Tiled, TiledExperts
from baltoro.kernels.moe.slab_end_text import MOST
from baltoro.kernels.moe.tile_layout import UNIT, padded
from baltoro.kernels.moe.tile_order import arranged, combine, grouped

# Whole rows of parts are stored 16 bytes at a time, experts' rows begin where the swizzle does.
ALIGN = 8
# Units of inputs in shared memory: as many as it holds.
STAGES = 5


def fits(experts: TiledExperts) -> bool:
    """Whether whole rows of their outputs begin at multiples of 16 bytes."""
    return experts.width % ALIGN == 0


def run(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: TiledExperts,
    activation: tuple[int, float, float],
    *,
    fake_activations: bool,
) -> Tensor:
    """As `tile_experts.run`, grouped: count, group, arrange, first product, [round,] second product, combine."""
    order, table = grouped(ids, len(experts.first_packed), MOST, ALIGN)
    x = arranged(z, order, 2, experts.width, num_active=ids.shape[1], is_rounded=fake_activations, is_slab=True)
    hidden = first(x, table, order, experts, activation, is_ordered=not fake_activations)
    if fake_activations:
        hidden = arranged(hidden, None, 2, hidden.shape[1], num_active=1, is_rounded=True, is_slab=True)
    return combine(second(hidden, table, order, experts, ids.numel()), weights, z)


def first(
    x: Tensor,
    table: Tensor,
    order: Tensor,
    experts: TiledExperts,
    activation: tuple[int, float, float],
    *,
    is_ordered: bool,
) -> Tensor:
    """hidden of slabs x [M' / 64, places, 64]: slabs [F' / 64, places, 64], or, not is_ordered, [places, F']."""
    inner, rows = padded(experts.inner), x.shape[1]
    hidden = torch.empty((inner // 64, rows, 64) if is_ordered else (rows, inner), dtype=x.dtype, device=x.device)
    _launch(x, table, order, experts.first, hidden, inner, activation, is_first=True, is_ordered=is_ordered)
    return hidden


def second(hidden: Tensor, table: Tensor, order: Tensor, experts: TiledExperts, pairs: int) -> Tensor:
    """parts [pairs, M] of slabs of hidden, in the order of the pairs, not weighted yet."""
    out = torch.empty(pairs, experts.width, dtype=hidden.dtype, device=hidden.device)
    one, none = experts.second, (0, 1.0, 1.0)
    _launch(hidden, table, order, one, out, experts.width, none, is_first=False, is_ordered=False)
    return out


def _launch(
    x: Tensor,
    table: Tensor,
    order: Tensor,
    one: Tiled,
    out: Tensor,
    width: int,
    activation: tuple[int, float, float],
    *,
    is_first: bool,
    is_ordered: bool,
) -> None:
    from baltoro.kernels.moe import gluon_slabs

    rows = one.packed.shape[1] * 8
    gluon_slabs.slab_kernel[(rows // slab_end_text.THREADS, table.shape[1])](
        x, table, order, one.packed.view(torch.int32), one.scale, out,
        len(one.packed), len(x) * 64 // UNIT, rows // 8, width, x.shape[1], *activation[1:],
        TEXT=program(activation[0], is_first, is_ordered), OPERANDS=slab_text.constraints(),
        PIECES=slab_text.shared_bytes(STAGES) // 4096, num_warps=slab_end_text.THREADS // 32,
    )  # fmt: skip


@cache
def program(kind: int, is_first: bool, is_ordered: bool) -> str:
    """`slab_text.text`, made once."""
    return slab_text.text(STAGES, kind, is_first, is_ordered)
