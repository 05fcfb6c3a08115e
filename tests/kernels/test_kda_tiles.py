"""The tiles of KDA decode and fold: they must sum over K in one order, whatever the number of programs."""

from __future__ import annotations

import pytest

from baltoro.kernels.kda import tiles


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("programs", [1, 12, 132, 133, 24576])
def test_decode_and_fold_hold_four_values_of_equal_parts(size: int, programs: int) -> None:
    decode, fold = tiles.decode(size, programs), tiles.fold(size)
    assert decode.part == fold.part and size % decode.part == size % decode.rows == size % fold.rows == 0
    is_one_tile = decode == fold and decode.rows == decode.part == size
    assert is_one_tile or all(tile.rows * tile.part >= 128 * tile.warps for tile in (decode, fold))


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("programs", [1, 1000])
def test_a_product_of_verify_has_at_least_sixteen_rows(size: int, programs: int) -> None:
    tile = tiles.verify(size, programs)
    assert tile.rows >= 16 and size % tile.rows == 0


def test_power_of_two() -> None:
    assert [tiles.power_of_two(size) for size in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
