"""The arena: views that do not overlap, borders, copies of whole slots and pages."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baltoro.cache import pool as pool_module
from baltoro.cache.pool import Pool
from baltoro.cache.shape import ALIGNMENT, ArenaLayout, ArenaShape, Part, UnifiedShape

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


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14),
    batch_bytes=st.sampled_from([1, 1024, 10**6]),
)
def test_copies_in_one_call_count_as_made_one_after_the_other(pairs: list[tuple[int, int]], batch_bytes: int) -> None:
    """Chains, repeated targets, sources written over afterwards: as a list of values would have it."""
    pool = _pool(num_slots=6, num_pages=7)
    recurrent, conv = pool.slot_views()
    rows, first = pool.row_view(), pool.shape.first_page
    assert rows is not None and isinstance(pool.shape, ArenaShape)
    for at in range(7):
        recurrent[at], conv[at], rows[first + at] = at, at, at
    wanted = list(range(7))
    for source, target in pairs:
        wanted[target] = wanted[source]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "BATCH_BYTES", batch_bytes)
        pool.copy_slots([source for source, _ in pairs], [target for _, target in pairs])
        pool.copy_pages([first + source for source, _ in pairs], [first + target for _, target in pairs])
    for view, low in ((recurrent, 0), (conv, 0), (rows, first)):
        assert [set(view[low + at].flatten().tolist()) for at in range(7)] == [{float(value)} for value in wanted]


def test_no_copy_reads_or_writes_what_the_same_batch_has_written() -> None:
    """A device makes the copies of a batch in any order."""
    pairs = [(1, 2), (3, 4), (4, 5), (6, 5), (7, 1), (8, 9), (8, 3), (3, 0)]
    sources, targets = zip(*pairs, strict=True)
    assert list(pool_module._batches(sources, targets, 3)) == [(0, 2), (2, 3), (3, 6), (6, 7), (7, 8)]
    assert list(pool_module._batches((), (), 3)) == []


def test_copied_rows_leave_the_rest_of_the_page() -> None:
    pool = _pool(page_size=4)
    rows, (first, second, third) = pool.row_view(), itertools.islice(_page_ids(pool), 3)
    assert rows is not None
    rows[first], rows[second], rows[third] = 1.0, 2.0, 3.0
    pool.copy_page_rows(first, second, 3)
    pool.copy_page_rows(first, third, 0)
    assert rows[second].flatten(1).mean(1).tolist() == [1.0, 1.0, 1.0, 2.0]
    assert bool((rows[first] == 1.0).all() and (rows[third] == 3.0).all())


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_a_zeroed_page_has_nothing_of_its_old_owner(page_size: int) -> None:
    """G-40: NaN of an old owner must not reach the masked rows of a page that is filled in part."""
    pool = _pool(page_size=page_size)
    pool.poison()
    rows, (first, second, third) = pool.row_view(), itertools.islice(_page_ids(pool), 3)
    assert rows is not None
    pool.zero_pages([third, first])
    pool.zero_pages([])
    assert not bool(rows[[first, third]].any()) and bool(rows[second].isnan().all())
    assert all(bool(part.isnan().all()) for part in pool.slot_views())


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_a_unified_arena_has_views_over_all_of_its_bytes(page_size: int) -> None:
    """Any border: slots below it and pages above it hold what was written, and both reach to their ends."""
    layout = ArenaLayout(SLOT_PARTS, ROW, page_size)
    shape = UnifiedShape(layout, 3 * layout.page_bytes + 6 * layout.slot_bytes + 17)
    pool = Pool(shape)
    (recurrent, conv), rows = pool.slot_views(), pool.row_view()
    assert rows is not None and pool.arena.numel() == shape.total_bytes
    assert len(recurrent) == len(conv) == shape.max_slots + 1 and len(rows) == shape.num_page_ids
    for num_slots in range(shape.max_slots + 1):
        slots = range(num_slots + 1)
        pages = [0, *range(shape.num_page_ids - shape.pages_beside(num_slots), shape.num_page_ids)]
        for at in slots:
            recurrent[at], conv[at] = at + 1, at + 1
        for at in pages:
            rows[at] = -at - 1
        assert all(bool((recurrent[at] == at + 1).all() and (conv[at] == at + 1).all()) for at in slots)
        assert all(bool((rows[at] == -at - 1).all()) for at in pages[:1] + pages[1:][:3] + pages[-1:])
        assert len(pages) == 1 or num_slots <= shape.slots_beside(len(pages) - 1)


def test_the_bytes_of_a_head_are_one_stretch() -> None:
    """The unit of a later transfer: one head of one layer of one slot."""
    recurrent, _ = _pool().slot_views()
    assert recurrent[1, 1, 2].is_contiguous()
    assert recurrent[1, 1, 2].data_ptr() - recurrent[1, 1, 1].data_ptr() == 4 * 4 * 4


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
