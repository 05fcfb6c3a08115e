"""The order of nibbles for kernels, and the table of tiles: plain torch, no triton."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baltoro.kernels.moe.permute import permute_experts
from baltoro.kernels.moe.products import ExpertWeights, Packed
from baltoro.kernels.moe.tile_layout import (
    SHARED,
    TURNS,
    padded,
    permute_matrix,
    unpermute_matrix,
    unweave,
    weave,
)
from baltoro.kernels.moe.tiles import tile_table
from baltoro.kernels.quant.mxfp4 import dequantise, pack


@given(st.integers(0, 3), st.integers(1, 3))
def test_woven_codes_come_back(rows: int, blocks: int) -> None:
    codes = torch.randint(0, 16, (rows, blocks * 32), dtype=torch.uint8)
    assert weave(codes).shape == (rows, blocks * 16)
    assert torch.equal(unweave(weave(codes)), codes)


@given(st.integers(1, 300), st.integers(1, 9))
def test_a_matrix_comes_back_from_its_tiles(rows: int, blocks: int) -> None:
    packed = torch.randint(0, 256, (rows, blocks * 16), dtype=torch.uint8)
    scale = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)
    tiles, scales = permute_matrix(packed, scale, 128)
    assert tiles.shape == (padded(rows) // 8, padded(blocks * 32) // 128, 512) and scales.shape == (
        *tiles.shape[:2],
        32,
    )
    back, scale_back = unpermute_matrix(tiles, scales, rows, blocks * 32)
    assert torch.equal(back, packed) and torch.equal(scale_back, scale)


def test_a_turn_and_a_mask_make_two_numbers_of_bf16() -> None:
    codes = torch.arange(32, dtype=torch.uint8).remainder(16)[None]
    expected = dequantise(pack(codes), torch.full((1, 1), 127, dtype=torch.uint8), torch.float32)[0]
    words = weave(codes).view(torch.int32)[0].long() & 0xFFFFFFFF
    one, two = words[::2], words[1::2]
    shared = one & SHARED | two & ~SHARED
    for word, pair in product(range(2), range(4)):
        source, turn = shared if pair == 3 else (one, two)[word], TURNS[word][pair]
        bits = (source >> turn | source << 32 - turn) & 0x81C081C0
        for lane in range(2):
            number = (bits >> 16 * lane & 0xFFFF).to(torch.uint16).view(torch.bfloat16).double() * 2.0**126
            column = pair // 2 * 16 + pair % 2 * 2 + lane + 4 * (2 * torch.arange(2) + word)
            assert torch.equal(number.float(), expected[column])


def test_gate_and_up_take_turns_and_dense_experts_are_refused() -> None:
    def matrix(rows: int, columns: int) -> Packed:
        packed = torch.randint(0, 256, (2, rows, columns // 2), dtype=torch.uint8)
        return Packed(packed, torch.randint(0, 256, (2, rows, columns // 32), dtype=torch.uint8))

    gate, up, down = matrix(40, 96), matrix(40, 96), matrix(96, 32)
    experts = permute_experts(ExpertWeights(w1=gate, w3=up, w2=down))
    assert (experts.width, experts.inner) == (96, 40) and experts.second.packed.shape == (2, 32, 1, 512)
    for part, one in enumerate((gate, up)):
        tiles, scales = (t[1].unflatten(0, (-1, 2))[:, part] for t in (experts.first.packed, experts.first.scale))
        packed, scale = unpermute_matrix(tiles, scales, 40, 96)
        assert torch.equal(packed, one.packed[1]) and torch.equal(scale, one.scale[1])
    with pytest.raises(TypeError, match="quantise"):
        permute_experts(ExpertWeights(w1=gate, w3=torch.zeros(2, 40, 96), w2=down))


@given(st.integers(0, 12), st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(0, 1000),
       st.sampled_from([1, 2]))  # fmt: skip
def test_tiles_hold_each_pair_once_under_its_expert(
    tokens: int, active: int, num_experts: int, rows: int, seed: int, align: int
) -> None:
    rows *= align
    ids = torch.randint(0, num_experts, (tokens, active), generator=torch.Generator().manual_seed(seed))
    order, tiles = tile_table(ids, num_experts, rows, align)
    assert tiles.shape == (3, -(-ids.numel() // rows) + num_experts) and tiles.dtype == torch.int32
    seen: list[int] = []
    for expert, first, end in tiles.T.tolist():
        if expert < num_experts:
            assert first < end
            assert end <= first + rows and first % align == 0
            pairs = order[first:end]
            assert (ids.flatten()[pairs] == expert).all()
            seen += pairs.tolist()
    assert sorted(seen) == list(range(ids.numel()))
    assert seen == torch.argsort(ids.flatten(), stable=True).tolist()
