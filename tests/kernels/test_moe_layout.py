"""The order of nibbles for kernels, and the table of tiles: plain torch, no triton."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baltoro.kernels.moe.experts import ExpertWeights, Packed
from baltoro.kernels.moe.permute import permute, permute_experts, unpermute
from baltoro.kernels.moe.tiles import tile_table
from baltoro.kernels.quant.mxfp4 import unpack


@given(st.integers(0, 3), st.integers(1, 3))
def test_published_bytes_come_back(rows: int, blocks: int) -> None:
    packed = torch.randint(0, 256, (rows, blocks * 16), dtype=torch.uint8)
    assert torch.equal(unpermute(permute(packed)), packed)
    assert torch.equal(permute(unpermute(packed)), packed)


def test_a_halved_byte_holds_columns_half_a_block_apart() -> None:
    packed = torch.randint(0, 256, (2, 32), dtype=torch.uint8)
    columns, halved = unpack(packed).view(2, 2, 32), permute(packed).view(2, 2, 16)
    assert torch.equal(halved & 15, columns[..., :16]) and torch.equal(halved >> 4, columns[..., 16:])


def test_experts_are_copied_and_dense_ones_refused() -> None:
    one = Packed(torch.randint(0, 256, (3, 4, 32), dtype=torch.uint8), torch.full((3, 4, 2), 127, dtype=torch.uint8))
    before = one.packed.clone()
    halved = permute_experts(ExpertWeights(w1=one, w3=one, w2=one))
    assert torch.equal(unpermute(halved.w2.packed), before) and torch.equal(one.packed, before)
    with pytest.raises(TypeError, match="quantise"):
        permute_experts(ExpertWeights(w1=one, w3=torch.zeros(3, 4, 64), w2=one))


@given(st.integers(0, 12), st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(0, 1000))
def test_tiles_hold_each_pair_once_under_its_expert(
    tokens: int, active: int, num_experts: int, rows: int, seed: int
) -> None:
    ids = torch.randint(0, num_experts, (tokens, active), generator=torch.Generator().manual_seed(seed))
    order, tiles = tile_table(ids, num_experts, rows)
    assert tiles.shape == (3, -(-ids.numel() // rows) + num_experts) and tiles.dtype == torch.int32
    seen: list[int] = []
    for expert, first, end in tiles.T.tolist():
        if expert < num_experts:
            assert first < end
            pairs = order[first : min(first + rows, end)]
            assert (ids.flatten()[pairs] == expert).all()
            seen += pairs.tolist()
    assert sorted(seen) == list(range(ids.numel()))
    assert seen == torch.argsort(ids.flatten(), stable=True).tolist()
