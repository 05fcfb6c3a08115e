"""The grouped product written out in PTX, on a CPU: whole products against the plain form, for all kinds of tiles."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from baltoro.errors import InvariantError
from baltoro.kernels.moe import slab_text
from baltoro.kernels.moe.experts import gathered
from baltoro.kernels.moe.permute import permute_experts
from baltoro.kernels.moe.products import ExpertWeights, Packed, Tiled
from baltoro.kernels.moe.reference import silu_glu, situ_glu
from baltoro.kernels.moe.slab_end_text import MOST, PLACES_AT, THREADS
from baltoro.kernels.moe.tiles import tile_table
from tests.kernels import ptx_by_numpy

NAN = -1  # of bf16, as int16
SITU = partial(situ_glu, beta=4.0, linear_beta=25.0)


def experts(num: int, width: int, hidden: int) -> ExpertWeights:
    def matrix(rows: int, columns: int) -> Packed:
        packed = torch.randint(0, 256, (num, rows, columns // 2), dtype=torch.uint8)
        return Packed(packed, torch.randint(118, 126, (num, rows, columns // 32), dtype=torch.uint8))

    return ExpertWeights(w1=matrix(hidden, width), w3=matrix(hidden, width), w2=matrix(width, hidden))


def slabs_of(x: Tensor) -> Tensor:
    """As `tile_order.arranged`."""
    column = torch.arange(x.shape[1])
    place = column % 32 // 16 * 64 + column % 16 // 2 * 8 + column % 128 // 32 * 2 + column % 2
    out = torch.zeros(len(x), -(-x.shape[1] // 128) * 128).to(x.dtype)
    out[:, column // 128 * 128 + place] = x
    runs = out.unflatten(1, (-1, 8, 8))
    swapped = [row[:, torch.arange(8) ^ (i % 8)] for i, row in enumerate(runs)]
    return torch.stack(swapped, 1).flatten(2).contiguous()


def pieces(stages: int) -> list[tuple[set[str], int]]:
    """Of shared memory, whose last bytes are lost to alignment: nothing, stages, barriers, places of the rows."""
    bells, end = 1024 + stages * slab_text.STAGE, ptx_by_numpy.START + slab_text.shared_bytes(stages)
    places, after = bells + PLACES_AT, bells + PLACES_AT + 4 * MOST
    stage = {"copy", "product", "matrix", "run"}
    return [(set(), 1024), (stage, bells), ({"bell"}, places), ({"word"}, after), (set(), end)]


def launch(
    x: Tensor, table: Tensor, order: Tensor, one: Tiled, out: Tensor, stages: int, kind: int, *,
    is_first: bool, is_ordered: bool, betas: tuple[float, float] = (4.0, 25.0),
) -> None:  # fmt: skip
    """All programs, one after the other, with NaN in shared memory."""
    rows = one.packed.shape[1] * 8
    text = slab_text.text(stages, kind, is_first, is_ordered)
    tensors = [t.contiguous().view(torch.uint8).numpy() for t in (x, table, order, one.packed, one.scale, out)]
    memory = ptx_by_numpy.Memory(tensors, pieces(stages))
    num, grid = len(one.packed), (rows // THREADS, table.shape[1])
    width = out.shape[0] * 64 if is_ordered else out.shape[1]
    inputs = [*((i + 1) << 32 for i in range(6)), num, len(x) // 2, rows // 8, width, x.shape[1], *betas]
    for block in range(grid[0]):
        for tile in range(grid[1]):
            memory.parts[0][:] = 0xFF
            ptx_by_numpy.run(text, memory, inputs, (block, tile), grid, THREADS)


@pytest.mark.parametrize(
    ("tokens", "width", "stages", "kind", "num", "active"),
    [
        *((11, 288, 3, 1, 3, 2), (40, 608, 3, 0, 3, 2), (130, 288, 5, 2, 3, 2), (260, 96, 3, 1, 3, 2)),
        *((30, 1312, 4, 1, 3, 2), (MOST, 96, 3, 1, 1, 1)),
    ],
)
def test_grouped_product(tokens: int, width: int, stages: int, kind: int, num: int, active: int) -> None:
    torch.manual_seed(0)
    inner = 160
    z, bytes_ = torch.randn(tokens, width).bfloat16(), experts(num, width, inner)
    ids, weights = torch.rand(tokens, num).topk(active).indices, torch.rand(tokens, active)
    order, table = tile_table(ids, num, slab_text.MOST, 8)
    tiles, live, places = permute_experts(bytes_), order >= 0, len(order)
    x = torch.full((places, width), NAN, dtype=torch.int16).view(torch.bfloat16)
    x[live] = z[order[live] // active]

    def nan(*shape: int) -> Tensor:
        return torch.full(shape, NAN, dtype=torch.int16).view(torch.bfloat16)

    hidden, plain, parts = nan(4, places, 64), nan(places, 256), nan(ids.numel(), width)
    product = partial(launch, slabs_of(x), table, order, tiles.first)
    product(hidden, stages, kind, is_first=True, is_ordered=True)
    product(plain, stages, kind, is_first=True, is_ordered=False)
    assert torch.equal(slabs_of(plain)[:, live], hidden[:, live])
    assert plain[~live].isnan().all() and hidden[:, ~live].isnan().all()
    launch(hidden, table, order, tiles.second, parts, stages, 0, is_first=False, is_ordered=False)
    got = (parts.view(tokens, active, width).float() * weights[:, :, None]).sum(1)
    activation = (silu_glu, SITU, partial(situ_glu, beta=4.0, linear_beta=None))[kind]
    expected = gathered(z.double(), ids, weights.double(), bytes_, activation=activation)
    assert float((got.double() - expected).norm() / expected.norm()) < 3e-3


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_activation_at_its_ends(kind: int) -> None:
    from baltoro.kernels.moe.slab_end_text import SCALE, activated, constants

    gate = np.array([0.0, 1e-6, 0.3, -0.3, 5.0, -5.0, 90.0, -90.0, 1e4, -1e4, np.nan, 1.0], np.float32).repeat(3)[:32]
    up = np.array([0.0, 0.7, -2.0, 400.0, -1e5, np.nan, 3.0], np.float32).repeat(5)[:32]
    names = {"beta": "$1", "linear_beta": "$2"}
    text = "\n".join([".reg .f32 es, ep, eq, by, a, b, d, p1, q1, g, u, o;", *constants(kind, names)])
    text += "\n" + "\n".join(activated(kind, "g", "u", "o"))
    given = {"g": gate / np.float32(SCALE), "u": up / np.float32(SCALE)}
    one = ptx_by_numpy.run(text, ptx_by_numpy.Memory([], [(set(), 16)]), [4.0, 25.0], (0, 0), (1, 1), 32, given)
    form = (silu_glu, SITU, partial(situ_glu, beta=4.0, linear_beta=None))[kind]
    expected = form(torch.from_numpy(gate).double(), torch.from_numpy(up).double())
    got = torch.from_numpy(one.registers["o"]).double()
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-6, equal_nan=True)


def test_whole_rows_need_the_memory_of_three_stages() -> None:
    with pytest.raises(InvariantError, match="2 stages"):
        slab_text.text(2, 0, is_first=False, is_ordered=False)


@pytest.mark.parametrize("tiles", [1, 2, 3, 19, 20, 21, 22, 100])
def test_no_tile_of_an_expert_is_empty(tiles: int) -> None:
    for count in (MOST * (tiles - 1) + 1, MOST * tiles - 1, MOST * tiles):
        _, table = tile_table(torch.zeros(count, 1, dtype=torch.int64), 1, MOST, 8)
        sizes = (table[2] - table[1])[table[0] < 1]
        assert len(sizes) == tiles and sizes.min() > 0 and sizes.max() <= MOST and sizes.sum() == count
