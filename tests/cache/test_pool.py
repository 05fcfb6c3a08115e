"""The arena: views that do not overlap, borders, copies of whole slots and pages."""

from __future__ import annotations

import itertools

import pytest
import torch

from baltoro.cache.pool import ALIGNMENT, ArenaLayout, ArenaShape, Part, Pool

ROW = Part((3, 5), torch.bfloat16)
SLOT_PARTS = (Part((2, 3, 4, 4), torch.float32), Part((2, 3, 7), torch.bfloat16))


def _pool(page_size: int = 4, num_slots: int = 3, num_pages: int = 5) -> Pool:
    return Pool(ArenaShape(ArenaLayout(SLOT_PARTS, ROW, page_size), num_slots, num_pages))


def _page_ids(pool: Pool) -> range:
    return range(pool.shape.first_page, pool.shape.first_page + pool.shape.num_pages)


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize(("num_slots", "num_pages"), [(1, 1), (3, 5), (7, 2)])
def test_slots_and_pages_never_overlap(page_size: int, num_slots: int, num_pages: int) -> None:
    """Every slot and page written with its own number reads back unchanged, the sinks too."""
    pool = _pool(page_size, num_slots, num_pages)
    parts, rows = pool.slot_views(), pool.row_view()
    assert rows is not None
    slots, pages = range(num_slots + 1), (0, *_page_ids(pool))
    for slot in slots:
        for part in parts:
            part[slot] = slot + 1
    for page in pages:
        rows[page] = -page - 1
    assert all(bool((part[slot] == slot + 1).all()) for slot in slots for part in parts)
    assert all(bool((rows[page] == -page - 1).all()) for page in pages)


def test_views_have_the_shapes_that_layers_expect() -> None:
    pool = _pool(page_size=4, num_slots=3)
    recurrent, conv = pool.slot_views()
    rows = pool.row_view()
    assert rows is not None
    assert recurrent.shape == (4, 2, 3, 4, 4) and recurrent.dtype == torch.float32
    assert conv.shape == (4, 2, 3, 7) and conv.dtype == torch.bfloat16
    assert rows.shape == (pool.shape.first_page + 5, 4, 3, 5)
    assert rows.unbind(2)[0].stride(1) == 15, "token-major: all layers of a position lie together"


def test_a_slot_is_one_aligned_block() -> None:
    layout = ArenaLayout(SLOT_PARTS, ROW, 4)
    assert layout.part_offsets == (0, 384, 512)  # 2*3*4*4*4 bytes; 2*3*7*2 = 84, aligned
    assert layout.slot_bytes % ALIGNMENT == 0
    assert layout.page_bytes == 4 * 15 * 2


def test_page_and_slot_copies_move_every_layer_and_nothing_else() -> None:
    pool = _pool()
    pool.poison()
    recurrent, conv = pool.slot_views()
    rows = pool.row_view()
    assert rows is not None
    first, second, third = itertools.islice(_page_ids(pool), 3)
    recurrent[1], conv[1], rows[first] = 2.0, 3.0, 4.0
    pool.copy_slot(1, 3)
    pool.copy_page(first, third)
    assert bool((recurrent[3] == 2.0).all() and (conv[3] == 3.0).all() and (rows[third] == 4.0).all())
    assert bool(recurrent[2].isnan().all() and conv[2].isnan().all() and rows[second].isnan().all())


def test_poison_is_nan_in_every_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        pool = Pool(ArenaShape(ArenaLayout((Part((2, 2), dtype),), Part((1, 3), dtype), 2), 2, 2))
        recurrent, rows = *pool.slot_views(), pool.row_view()
        assert rows is not None
        recurrent.zero_()
        rows.zero_()
        pool.poison_ids([pool.shape.first_page], [2])
        assert bool(recurrent[2].isnan().all()) and not bool(recurrent[1].isnan().any())
        assert bool(rows[pool.shape.first_page].isnan().all()) and not bool(rows[0].isnan().any())


def test_a_model_with_one_kind_of_state_has_no_bytes_for_the_other() -> None:
    no_pages = Pool(ArenaShape(ArenaLayout(SLOT_PARTS, None, 4), 2, 9))
    assert no_pages.row_view() is None
    assert no_pages.arena.numel() == 3 * no_pages.layout.slot_bytes
    no_pages.copy_page(1, 2)
    no_slots = Pool(ArenaShape(ArenaLayout((), ROW, 4), 2, 9))
    assert no_slots.slot_views() == ()
    assert no_slots.shape.first_page == 1
    no_slots.copy_slot(1, 2)
