"""The grouped product of tiled experts in Gluon: what it computes, against the plain form. That operands lie where
wgmma reads them, and the barriers, a GPU shows.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baltoro.kernels.moe import gluon_launch
from baltoro.kernels.moe.experts import gathered
from baltoro.kernels.moe.permute import permute_experts
from baltoro.kernels.moe.products import ExpertWeights, Packed, Tiled
from baltoro.kernels.moe.reference import situ_glu
from baltoro.kernels.moe.tile_layout import UNIT
from baltoro.kernels.moe.tiles import tile_table
from baltoro.kernels.quant import mxfp8
from tests.kernels.gluon_by_torch import kernels

FILE = Path(gluon_launch.__file__).parent / "gluon_parts.py"
TEXT = FILE.with_name("weave_text.py")


def experts(num: int, width: int, hidden: int) -> ExpertWeights:
    def matrix(rows: int, columns: int) -> Packed:
        packed = torch.randint(0, 256, (num, rows, columns // 2), dtype=torch.uint8)
        return Packed(packed, torch.randint(118, 126, (num, rows, columns // 32), dtype=torch.uint8))

    return ExpertWeights(w1=matrix(hidden, width), w3=matrix(hidden, width), w2=matrix(width, hidden))


@pytest.mark.parametrize(("rows", "stages", "pieces", "short"), [(16, 2, 1, 0), (16, 3, 2, 8), (8, 4, 4, 0)])
def test_grouped_product(rows: int, stages: int, pieces: int, short: int) -> None:
    """pieces: of the ring's blocks."""
    torch.manual_seed(0)
    width, inner, num, active = 288, 160, 3, 2
    z, bytes_ = torch.randn(11, width).bfloat16(), experts(num, width, inner)
    ids, weights = torch.rand(11, num).topk(active).indices, torch.rand(11, active)
    order, table = tile_table(ids, num, rows)
    tiles = permute_experts(bytes_)
    ring = kernels(FILE.with_name("gluon_ring.py"), others=(TEXT, FILE))["ring_kernel"]

    def put_in_order(x: Tensor, columns: int) -> Tensor:
        column = torch.arange(columns)
        place = column % 32 // 16 * 64 + column % 16 // 2 * 8 + column % 128 // 32 * 2 + column % 2
        out = torch.zeros(len(x), -(-columns // UNIT) * UNIT).to(x.dtype)
        out[:, column // UNIT * UNIT + place] = x
        return out

    def launch(x: Tensor, packed: Tensor, scale: Tensor, out: Tensor, num_rows: int, is_first: bool) -> None:
        boxes, units = x.unflatten(1, (-1, 64)).transpose(0, 1), x.shape[1] // UNIT
        sizes = (num, units, num_rows // 8, out.shape[1], 4.0, 25.0, rows)
        kind = (1 if is_first else 0, is_first, is_first)
        words = packed.view(torch.int32)
        words, scales = words.reshape(-1, units * 4, 32), scale.reshape(-1, units * 32)
        given = (words, scales, boxes, boxes, table, order, out, *sizes, short, 8, pieces, stages, *kind)
        ring((num_rows // (128 * pieces), table.shape[1]), *given, stages == 3, True)

    hidden = torch.full((22, 256), float("nan")).bfloat16()
    x = put_in_order(z[order // active], width)
    launch(x, tiles.first_packed, tiles.first_scale, hidden, 512, True)
    parts = torch.full((22, width), float("nan")).bfloat16()
    launch(hidden, tiles.second_packed, tiles.second_scale, parts, 512, False)
    got = (parts.view(11, active, width).float() * weights[:, :, None]).sum(1)
    activation = partial(situ_glu, beta=4.0, linear_beta=25.0)
    expected = gathered(z.double(), ids, weights.double(), bytes_, activation=activation)
    assert float((got.double() - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.parametrize(("warps", "width", "is_rounded"), [(1, 288, False), (2, 256, False), (4, 288, True)])
def test_product_of_few_rows(warps: int, width: int, is_rounded: bool) -> None:
    torch.manual_seed(0)
    inner, num, active = 160, 3, 2
    z, bytes_ = torch.randn(11, width).bfloat16(), experts(num, width, inner)
    ids, weights = torch.rand(11, num).topk(active).indices, torch.rand(11, active)
    order, table = tile_table(ids, num, 8)
    tiles = permute_experts(bytes_)
    kernel = kernels(FILE.parent / "gluon_few.py", others=(TEXT, FILE))["few_kernel"]

    def launch(x: Tensor, one: Tiled, out: Tensor, num_rows: int, is_first: bool) -> None:
        kernel(
            (num_rows // (64 * warps), table.shape[1]), x, table, order, one.packed.view(torch.int32).flatten(),
            one.scale.flatten(), out, num, active, -(-x.shape[1] // UNIT), num_rows // 8, x.shape[1], x.shape[1],
            out.shape[1], 4.0, 25.0, warps, int(is_first), is_first, x.shape[1] % UNIT == 0,
            is_rounded and is_first, False,
        )  # fmt: skip

    hidden = torch.full((22, 256), float("nan")).bfloat16()
    launch(mxfp8.fake(z) if is_rounded else z, tiles.first, hidden, 512, True)
    parts = torch.full((22, width), float("nan")).bfloat16()
    launch(hidden, tiles.second, parts, 512 if width > 256 else 256, False)
    got = (parts.view(11, active, width).float() * weights[:, :, None]).sum(1)
    activation = partial(situ_glu, beta=4.0, linear_beta=25.0)
    options = {"activation": activation, "fake_activations": is_rounded}
    expected = gathered(z.double(), ids, weights.double(), bytes_, **options)
    assert float((got.double() - expected).norm() / expected.norm()) < (2e-2 if is_rounded else 5e-3)
