"""Bytes between the pool and the host: bit for bit, every shape of page against every shape of block."""

from __future__ import annotations

import pytest
import torch

from baltoro.cache.host_store import BLOCKS_PER_STATE, HostStore, plan_host
from baltoro.cache.pool import Pool
from baltoro.cache.shape import ArenaLayout, ArenaShape, Part
from baltoro.errors import ConfigError, ShapeError

ROW = Part((3, 5), torch.bfloat16)
SLOT_PARTS = (Part((2, 3, 4, 4), torch.float32), Part((2, 3, 7), torch.bfloat16))


def make_pool(page_size: int, num_pages: int = 9) -> Pool:
    """A pool full of random bytes, NaNs of any payload among them."""
    pool = Pool(ArenaShape(ArenaLayout(SLOT_PARTS, ROW, page_size), 3, num_pages))
    pool.arena.random_(0, 256, generator=torch.Generator().manual_seed(page_size))
    return pool


def page_bytes(pool: Pool) -> torch.Tensor:
    """[P * page_size, row bytes]"""
    rows = pool.row_view()
    assert rows is not None
    return rows.flatten(0, 1).flatten(1).view(torch.uint8)


@pytest.mark.parametrize(
    ("page_size", "num_pages", "first_row", "num_rows"),
    [(1, 6, 0, 6), (2, 3, 0, 6), (6, 1, 0, 6), (18, 1, 12, 6), (4, 2, 3, 5), (2, 2, 1, 3), (1, 1, 0, 1), (16, 1, 5, 2)],
)
def test_rows_come_back_bit_for_bit_to_other_pages(
    page_size: int, num_pages: int, first_row: int, num_rows: int
) -> None:
    pool = make_pool(page_size, 2 * num_pages + 1)
    store = HostStore.for_pool(pool, 100_000, endpoint=6)
    first = pool.shape.first_page
    sources = [first + 2 * i for i in range(num_pages)][::-1]
    targets = [first + 2 * i + 1 for i in range(num_pages)]
    rows = page_bytes(pool)
    before = pool.arena.clone()

    def ids(pages: list[int]) -> list[int]:
        return [page * page_size + row for page in pages for row in range(page_size)][first_row : first_row + num_rows]

    wanted = rows[ids(sources)].clone()
    store.save_block(pool, 3, sources, first_row, num_rows)
    assert torch.equal(pool.arena, before), "saving writes nothing to the pool"
    rows[ids(sources)] = 0xFF
    others = torch.ones(rows.shape[0], dtype=torch.bool)
    others[ids(targets)] = False
    kept = rows[others].clone()
    store.load_block(pool, 3, targets, first_row, num_rows)
    assert torch.equal(rows[ids(targets)], wanted)
    assert torch.equal(rows[others], kept), "no other row is written"


def test_a_state_comes_back_bit_for_bit_to_another_slot() -> None:
    pool = make_pool(4)
    store = HostStore.for_pool(pool, 100_000, endpoint=8)
    before, third = [view.clone() for view in pool.slot_views()], pool.slot_views()[0][3].clone()
    store.save_state(pool, 1, 1)
    pool.poison_ids([], [1])
    store.load_state(pool, 1, 2)
    for view, old in zip(pool.slot_views(), before, strict=True):
        assert torch.equal(view[2].view(torch.uint8), old[1].view(torch.uint8))
    assert torch.equal(pool.slot_views()[0][3].view(torch.uint8), third.view(torch.uint8))


def test_bytes_for_a_file_are_those_of_the_slab_and_can_be_written() -> None:
    pool = make_pool(2)
    store = HostStore.for_pool(pool, 100_000, endpoint=4)
    page = pool.shape.first_page
    store.save_block(pool, 0, [page, page + 1], 0, 4)
    store.save_state(pool, 0, 1)
    block, state = bytes(store.block_bytes(0)), bytes(store.state_bytes(0))
    assert block == page_bytes(pool)[page * 2 : page * 2 + 4].numpy().tobytes()
    assert len(block) == store.shape.block_bytes and len(state) == store.shape.state_bytes
    store.block_bytes(1)[:] = block
    store.state_bytes(1)[:] = state
    assert torch.equal(store.blocks[0].view(torch.uint8), store.blocks[1].view(torch.uint8))
    assert torch.equal(store.states[0], store.states[1])


def test_rows_that_no_page_holds_are_refused() -> None:
    pool = make_pool(4)
    store = HostStore.for_pool(pool, 100_000, endpoint=8)
    for pages, first_row, num_rows in (([1], 0, 8), ([1, 2], 1, 8), ([1, 2], 4, 2), ([1, 2, 3], 0, 9), ([1], 0, 0)):
        with pytest.raises(ShapeError):
            store.save_block(pool, 0, pages, first_row, num_rows)


def test_a_model_without_kv_or_without_states_has_no_bytes_for_it() -> None:
    no_kv = Pool(ArenaShape(ArenaLayout(SLOT_PARTS, None, 4), 2, 9))
    store = HostStore.for_pool(no_kv, 5_000, endpoint=8)
    assert store.shape.num_states == 9 and store.shape.num_blocks == 9 * BLOCKS_PER_STATE
    store.save_block(no_kv, 0, [1, 2], 0, 8)
    store.load_block(no_kv, 0, [1, 2], 0, 8)
    assert bytes(store.block_bytes(0)) == b""
    no_states = Pool(ArenaShape(ArenaLayout((), ROW, 4), 2, 9))
    store = HostStore.for_pool(no_states, 5_000, endpoint=8)
    assert store.shape.num_states == 0 and store.shape.num_blocks == 5_000 // (8 * 30)


def test_a_budget_is_kept_and_a_small_one_holds_one_of_each() -> None:
    layout = ArenaLayout(SLOT_PARTS, ROW, 4)
    block, state = 8 * 30, layout.slot_bytes
    shape = plan_host(10 * (block + state), layout, 8)
    assert shape.total_bytes <= 10 * (block + state) and shape.num_states >= 5 and shape.num_blocks >= 10
    smallest = plan_host(block + state, layout, 8)
    assert (smallest.num_blocks, smallest.num_states) == (1, 1)
    with pytest.raises(ConfigError, match=f"at least {block + state} bytes"):
        plan_host(block + state - 1, layout, 8)
