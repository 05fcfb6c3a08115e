"""Copies inside the arena under the interpreter: every byte, and no other."""

from __future__ import annotations

import pytest
import torch

from baltoro.cache.pool import Pool
from baltoro.cache.shape import ArenaLayout, ArenaShape, Part
from baltoro.kernels.paged import fast, reference


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64])
@pytest.mark.parametrize("words", [1, 1000, 2500])
def test_blocks_move_whole_and_alone(words: int, dtype: torch.dtype) -> None:
    buffer = torch.randint(-100, 100, (9, words + 3), dtype=dtype)
    fast_blocks, plain = buffer.clone()[:, :words], buffer.clone()[:, :words]
    sources, targets = torch.tensor([1, 1, 5, 6]), torch.tensor([0, 8, 3, 6])
    fast.copy_blocks(fast_blocks, sources, targets)
    reference.copy_blocks(plain, sources, targets)
    assert torch.equal(fast_blocks, plain)
    fast.copy_blocks(fast_blocks, sources[:0], targets[:0])
    assert torch.equal(fast_blocks, plain)


def test_chains_of_a_pool_come_out_as_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ArenaLayout((Part((3, 5), torch.float32),), Part((7,), torch.bfloat16), 4)
    pools = [Pool(ArenaShape(layout, 6, 6)) for _ in range(2)]
    pools[0].arena.random_(0, 255)
    pools[1].arena.copy_(pools[0].arena)
    monkeypatch.setattr(pools[1], "_copy_blocks", fast.copy_blocks)
    for pool in pools:
        pool.copy_slots([1, 2, 1, 3, 5], [2, 4, 6, 1, 3])
        first = pool.shape.first_page
        pool.copy_pages([first, first + 1, first + 3], [first + 2, first, first + 4])
    assert torch.equal(pools[0].arena, pools[1].arena)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_their_places(dtype: torch.dtype) -> None:
    wide = torch.randn(5, 4, 3, 29).to(dtype)
    kv, plain = wide.clone()[:, :, 1], wide.clone()[:, :, 1]
    rows = torch.randn(6, 40).to(dtype)
    latent, shared = rows[:, 1:22], rows[:, 25:33]
    places = (torch.tensor([0, 4, 4, 2, 1, 3]), torch.tensor([0, 3, 1, 2, 2, 0]))
    fast.scatter_rows(kv, places, latent, shared)
    reference.scatter_rows(plain, places, latent, shared)
    assert torch.equal(kv, plain)
    fast.scatter_rows(kv, (places[0][:0], places[1][:0]), latent[:0], shared[:0])
    assert torch.equal(kv, plain)
