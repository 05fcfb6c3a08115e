"""Split-KV latent attention under the interpreter against the float64 reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.mla import reference
from baltoro.kernels.mla.split_decode import Tiles, attend_absorbed, choose_tiles, num_splits
from tests.kernels.tolerances import TOLERANCES

LATENT, SHARED, PAGE, PAGES = 40, 8, 16, 70


def world(
    lengths: list[int], heads: int, window: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, kv (one layer of two, every row nobody uses NaN), page_table, lengths."""
    shape = (len(lengths), heads) if window is None else (len(lengths), window, heads)
    q = torch.randn(*shape, LATENT + SHARED).to(dtype)
    kv = torch.full((PAGES, PAGE, 2, LATENT + SHARED), float("nan"), dtype=dtype)[:, :, 1]
    most = -(-max(*lengths, 1) // PAGE)
    table, free = torch.zeros(len(lengths), most + 1, dtype=torch.int64), (torch.randperm(PAGES - 1) + 1).tolist()
    for n, length in enumerate(lengths):
        for place in range(length):
            if place % PAGE == 0:
                table[n, place // PAGE] = free.pop()
            kv[table[n, place // PAGE], place % PAGE] = torch.randn(LATENT + SHARED).to(dtype)
    return q, kv, table, torch.tensor(lengths)


def check(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: str) -> None:
    (out, lse), (exact, exact_lse) = got, expected
    assert out.dtype == lse.dtype == torch.float32 and out.isfinite().all()
    bound = TOLERANCES["mla_attend_absorbed"][dtype]
    assert float((out.double() - exact).norm() / exact.norm()) < bound
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    some = exact_lse > -torch.inf
    torch.testing.assert_close(lse[some].double(), exact_lse[some], rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("splits", "heads"), [(1, 12), (3, 12), (7, 5), (None, 20)])
def test_equals_the_reference_with_nan_behind_every_length(splits: int | None, heads: int, dtype: str) -> None:
    q, kv, table, lengths = world([0, 1, 64, 65, 200], heads, None, getattr(torch, dtype))
    got = attend_absorbed(q, kv, table, lengths, latent=LATENT, scale=0.3, splits=splits)
    exact = reference.attend_absorbed(q.double(), kv.double(), table, lengths, latent=LATENT, scale=0.3)
    check(got, exact, dtype)
    assert not got[0][0].any()


@pytest.mark.parametrize(("window", "heads", "splits"), [(2, 12, 1), (8, 12, 2), (8, 3, 4)])
def test_a_window_is_causal_inside(window: int, heads: int, splits: int) -> None:
    q, kv, table, lengths = world([window, 63 + window, 130, 1], heads, window, torch.float32)
    got = attend_absorbed(q, kv, table, lengths, latent=LATENT, scale=0.3, splits=splits)
    exact = reference.attend_absorbed(q.double(), kv.double(), table, lengths, latent=LATENT, scale=0.3)
    check(got, exact, "float32")


def test_a_window_over_the_limit_is_refused() -> None:
    q, kv, table, lengths = world([9], 2, 9, torch.float32)
    with pytest.raises(ShapeError, match="window"):
        attend_absorbed(q, kv, table, lengths, latent=LATENT, scale=0.3)


def test_float64_and_no_requests() -> None:
    q, kv, table, lengths = world([5], 2, None, torch.float64)
    exact = reference.attend_absorbed(q, kv, table, lengths, latent=LATENT, scale=0.3)
    torch.testing.assert_close(attend_absorbed(q, kv, table, lengths, latent=LATENT, scale=0.3), exact)
    out, lse = attend_absorbed(q[:0].float(), kv.float(), table[:0], lengths[:0], latent=LATENT, scale=0.3)
    assert out.shape == (0, 2, LATENT) and lse.shape == (0, 2)


def test_offsets_are_64_bits_wide(tmp_path: Path) -> None:
    """The last page of an arena of more than 2**31 values, in a file with a hole."""
    width, pages = LATENT + SHARED, 2**31 // (PAGE * (LATENT + SHARED)) + 2
    flat = torch.from_file(str(tmp_path / "kv"), shared=True, size=pages * PAGE * width, dtype=torch.bfloat16)
    kv = flat.view(pages, PAGE, width)
    kv[-1] = torch.randn(PAGE, width)
    q, table, lengths = torch.randn(1, 3, width).bfloat16(), torch.tensor([[pages - 1]]), torch.tensor([11])
    got = attend_absorbed(q, kv, table, lengths, latent=LATENT, scale=0.3)
    exact = reference.attend_absorbed(q.double(), kv[-1:].double(), table * 0, lengths, latent=LATENT, scale=0.3)
    check(got, exact, "bfloat16")


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("tiles", [Tiles(16, 64, 3, 8, flip=True), Tiles(64, 32, 1, 8, flip=True), Tiles(16, 32, 3, 4)])
def test_any_page_size_and_tile(tiles: Tiles, page: int) -> None:
    arena = torch.randn(2048 // page + 1, page, LATENT + SHARED)
    table = torch.randperm(len(arena))[: 6 * 128 // page].view(2, -1)
    q, lengths = torch.randn(2, 5, LATENT + SHARED), torch.tensor([3 * 128, 200])
    got = attend_absorbed(q, arena, table, lengths, latent=LATENT, scale=0.3, splits=3, tiles=tiles)
    exact = reference.attend_absorbed(q.double(), arena.double(), table, lengths, latent=LATENT, scale=0.3)
    check(got, exact, "float32")


def test_the_planner_knows_shapes_only_and_fills_the_card() -> None:
    one, two = Tiles(16, 64, 3, 8), Tiles(16, 32, 3, 8, per_unit=2)
    assert num_splits(1, 12, 131072, 132, one) == 128 and num_splits(1, 12, 131072, 132, two) == 256
    assert num_splits(64, 12, 131072, 132, one) == 2 and num_splits(400, 12, 131072, 132, two) == 1
    assert num_splits(1, 96 * 8, 131072, 132, Tiles(64, 32, 3, 8)) == 11
    assert num_splits(1, 12, 100, 132, one) == 1 and num_splits(0, 12, 0, 0, one) == 1
    assert choose_tiles(12, 2, 64, is_large=True).rows == 16 and choose_tiles(768, 2, 48, is_large=True).rows == 16
    assert choose_tiles(768, 2, 64, is_large=True).rows == 64 and choose_tiles(768, 4, 64, is_large=True).stages == 1
