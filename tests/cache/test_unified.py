"""The unified books against a dictionary with real bytes, under random operations; the public faults of such pools."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from baltoro.cache.audit import Holding, audit
from baltoro.cache.books import BookMove
from baltoro.cache.pool import Pool
from baltoro.cache.region import Region
from baltoro.cache.shape import ArenaLayout, Part, UnifiedShape
from baltoro.cache.unified import UnifiedBooks
from baltoro.errors import ConfigError, LeakError, PoolExhausted
from tests.cache.memory_model import SLOT_PARTS, MemoryModel, small_shape


class Unified(RuleBasedStateMachine):
    """Small arenas, few operations: what fails here is shrunk to a short story."""

    @initialize(
        num_bytes=st.integers(450, 1500),
        page_size=st.sampled_from([1, 5, 16, 40]),
        slot_limit=st.sampled_from([3, 100]),
        page_limit=st.sampled_from([4, 1000]),
        num_slots=st.integers(0, 8),
    )
    def start(self, num_bytes: int, page_size: int, num_slots: int, **limits: int) -> None:
        shape = small_shape(max(num_bytes, 128 + 3 * 8 * page_size), page_size, SLOT_PARTS[:1], **limits)
        self.model = MemoryModel(shape)
        for _ in range(min(num_slots, shape.max_slots)):
            self.model.take_slot()
        self.model.take_pages(self.model.books.pages.num_free)

    @rule(count=st.integers(0, 12))
    def take_pages(self, count: int) -> None:
        self.model.take_pages(count)

    @rule()
    def take_slot(self) -> None:
        self.model.take_slot()

    @rule(num_pages=st.integers(0, 30), num_slots=st.integers(0, 6))
    def ask_then_take(self, num_pages: int, num_slots: int) -> None:
        """What has room together is given, in whatever order it is taken."""
        if not self.model.ask(num_pages, num_slots):
            return
        refused = self.model.num_refused
        for _ in range(num_slots // 2):
            self.model.take_slot()
        self.model.take_pages(num_pages)
        for _ in range(num_slots - num_slots // 2):
            self.model.take_slot()
        assert self.model.num_refused == refused

    @precondition(lambda self: self.model.used())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.model.release(self._some(data, self.model.used()))

    @precondition(lambda self: self.model.used())
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        self.model.share([block for kind, block in self._some(data, self.model.used()) if kind == "page"])

    @precondition(lambda self: self.model.used())
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        self.model.hold(self._some(data, self.model.used()))

    @precondition(lambda self: self.model.held())
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        self.model.unhold(self._some(data, self.model.held()))

    @rule()
    def freeze(self) -> None:
        self.model.freeze()

    @precondition(lambda self: self.model.num_frozen)
    @rule()
    def thaw(self) -> None:
        self.model.thaw()

    def _some(self, data: st.DataObject, blocks: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return data.draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=6, unique=True))


TestUnified = Unified.TestCase
TestUnified.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


WEIGHTS = (3.0, 3.0, 1.5, 0.4, 1.5, 0.2)  # take pages, take a slot, release, hold, unhold, share


def _random_operations(count: int, seed: int) -> MemoryModel:
    """Phases in which slots, pages, or givings back come more often, so that the border wanders."""
    draw, weights = random.Random(seed), list(WEIGHTS)
    shape = small_shape(draw.choice((1000, 1500, 2500)), draw.choice((5, 11, 24)), parts=SLOT_PARTS[:1])
    model, goes = MemoryModel(shape), ("page", "slot")
    for at in range(count):
        if at % 12 == 0:
            goes = draw.choice((("page",), ("slot",), ("page", "slot")))
            weights = [draw.choice((0.2, 1, 4)) * weight for weight in WEIGHTS]
            if model.num_frozen:
                model.thaw()
            elif draw.random() < 0.15:
                model.freeze()
        used, held = [block for block in model.used() if block[0] in goes], model.held()
        some = draw.sample(used, -(-len(used) // draw.choice((2, 3, 8))))
        kind = draw.choices(("pages", "slot", "release", "hold", "unhold", "share"), weights)[0]
        if kind == "pages":
            model.take_pages(draw.choice((0, 1, 1, 2, 5, 9)))
        elif kind == "slot":
            model.take_slot()
        elif kind == "release":
            model.release(some)
        elif kind == "hold":
            model.hold(some[:3])
        elif kind == "unhold":
            model.unhold(draw.sample(held, -(-len(held) // 2)))
        else:
            model.share([block for name, block in some if name == "page"])
        model.ask(draw.randint(0, 20), draw.randint(0, 4))
    return model


def _check_random_operations(count: int, seeds: range) -> None:
    models = [_random_operations(count // len(seeds), seed) for seed in seeds]
    for what, least in (("moves", 1 / 100), ("refused", 1 / 20), ("cramped", 1 / 200)):
        seen = sum(model.books.num_moves if what == "moves" else getattr(model, f"num_{what}") for model in models)
        assert seen > least * count, f"only {seen} {what} in {count} operations"


@pytest.mark.slow
def test_ten_thousand_operations_keep_every_byte() -> None:
    """G-53: no move through a closed gate, no stale capacity, no lost pending block."""
    _check_random_operations(10_000, range(20))


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_a_hundred_thousand_operations_keep_every_byte(part: int) -> None:
    _check_random_operations(10_000, range(100 + 10 * part, 110 + 10 * part))


# ---- one case each -------------------------------------------------------------------------------------------------
SHAPE = small_shape(1800, page_size=16)
"""Slots of 128 bytes from byte 128, the sink first; 14 pages of 128 bytes, ids 0..13: a page is as large as a slot."""


def test_the_arithmetic_of_a_shape_by_hand() -> None:
    assert (SHAPE.total_bytes, SHAPE.slots_base, SHAPE.num_page_ids) == (1792, 128, 14)
    assert (SHAPE.max_slots, SHAPE.max_pages) == (12, 12)
    assert [SHAPE.slots_beside(n) for n in (0, 1, 12)] == [12, 11, 0]
    assert [SHAPE.pages_beside(n) for n in (0, 1, 12)] == [12, 11, 0]
    assert (SHAPE.slots_end(3), SHAPE.pages_start(3)) == (128 + 4 * 128, 11 * 128)
    uneven = small_shape(1800, page_size=5)  # pages of 40 bytes, 44 of them in 1792; slots from byte 64
    assert uneven.slots_base == 64 and uneven.max_slots == (44 * 40 - 64) // 128 - 1
    assert uneven.pages_beside(2) == 44 - 12, "slots end at byte 448, in the middle of page 11"
    with pytest.raises(ConfigError, match="raise memory_bytes"):
        small_shape(200, page_size=5)


def test_a_hole_is_filled_before_anything_moves_or_grows() -> None:
    books = UnifiedBooks(SHAPE)
    pages, slots = books.pages.take(6), [books.slots.take() for _ in range(6)]
    assert [books.slots.physical(slot) for slot in slots] == [1, 2, 3, 4, 5, 6]
    assert books.pages.physical(np.array(pages)).tolist() == [13, 12, 11, 10, 9, 8]
    assert not books.has_room(1, 0) and not books.has_room(0, 1)
    books.slots.release(slots[1])
    books.pages.release(pages[2:4])
    assert books.slots.physical(books.slots.take()) == 2
    assert books.pages.physical(np.array(books.pages.take(1))).tolist() == [11]
    assert books.num_moves == 0 and books.take_moves() == []


def test_blocks_at_the_border_move_only_when_the_room_is_needed() -> None:
    books = UnifiedBooks(SHAPE)
    pages, slots = books.pages.take(6), [books.slots.take() for _ in range(6)]
    for slot in (slots[0], slots[3]):
        books.slots.release(slot)
    assert books.take_moves() == [] and books.pages.num_free == 2 and books.slots.num_free == 2
    (page,) = books.pages.take(1)
    assert books.take_moves() == [BookMove("slot", 6, 1)], "one block, as far from the border as can be"
    assert books.pages.physical(np.array([page])).tolist() == [7]
    assert books.slots.physical(slots[5]) == 1
    books.pages.release(pages[:2])
    books.slots.take()
    books.slots.take()
    assert books.take_moves() == [BookMove("page", 7, 13)]
    assert not books.has_room(0, 2) and books.has_room(0, 1) and books.has_room(1, 0) and not books.has_room(1, 1)


def test_a_transfer_finds_a_moved_block_and_keeps_it_there() -> None:
    """G-52: physical ids at the time of the transfer, and no move while it lasts."""
    model = MemoryModel(SHAPE)
    for _ in range(6):
        model.take_slot()
    model.take_pages(6)
    model.release([("slot", 1)])
    model.take_pages(1)
    assert model.place(("slot", 6)) == 1, "compacted: virtual and physical differ"
    model.release([("slot", 2), ("slot", 3)])
    model.hold([("slot", 5)])
    model.take_pages(1)
    assert model.num_cramped == 1 and model.place(("slot", 5)) == 5, "the block at the border is being read"
    model.release([("slot", 5)])
    model.take_pages(1)
    assert model.num_cramped == 2, "its owner is gone, the reader is not"
    model.unhold([("slot", 5)])
    model.take_pages(1)
    assert model.num_refused == 2 and model.books.slots.num_used == 2


def test_tables_have_the_size_of_their_own_kind() -> None:
    """G-54: many pages beside few slots; ids past the end of either table are faults, not neighbours."""
    shape = small_shape(4096, page_size=1, slot_limit=2)
    books = UnifiedBooks(shape)
    assert (books.slots.count, books.pages.count) == (2, shape.max_pages) and books.pages.count > 400
    pages = np.array(books.pages.take(books.pages.count))
    assert sorted(books.pages.physical(pages).tolist()) == list(range(shape.num_page_ids - len(pages), len(pages) + 24))
    assert books.pages.physical(np.array([0, pages[0]])).tolist() == [0, shape.num_page_ids - 1], "0 is the sink"
    assert books.slots.physical(0) == 0
    for wrong in (-1, -2, books.pages.count + 1, 10**12):
        with pytest.raises(LeakError):
            books.pages.physical(np.array([1, wrong]))
        with pytest.raises(LeakError):
            books.slots.physical(wrong)
    with pytest.raises(LeakError, match="free"):
        books.slots.physical(2)


@pytest.mark.parametrize("index", [70_000])
def test_offsets_are_64_bits_wide(index: int, tmp_path: Path) -> None:
    """G-55: slot 70,000 with 49,152 values each lies behind 2^31 values; the arena is a file without blocks."""
    layout = ArenaLayout((Part((1, 3, 128, 128), torch.float32),), Part((1, 64), torch.bfloat16), 64)
    assert layout.slot_bytes == 4 * 49_152
    shape = UnifiedShape(layout, (index + 2) * layout.slot_bytes)
    file = tmp_path / "arena"
    with file.open("wb") as out:
        out.truncate(shape.total_bytes)
    arena = torch.from_file(str(file), shared=True, size=shape.total_bytes, dtype=torch.uint8)
    pool = Pool(shape, arena=arena)
    (states,), rows = pool.slot_views(), pool.row_view()
    assert rows is not None
    slot, page = shape.max_slots, shape.num_page_ids - 1
    assert slot >= index - 1 and states[slot].storage_offset() > 2**31 and rows[page].storage_offset() > 2**31
    states[slot].fill_(2.0)
    pool.copy_slots([slot, 1], [1, slot - 3])
    assert bool((states[slot - 3] == 2.0).all()) and not bool(states[0].any() or states[slot - 4].any())
    rows[1] = 3.0
    pool.copy_pages([1, page - 1], [page, page - 2])
    assert bool((rows[page] == 3.0).all()) and not bool(rows[page - 1].any())
    books = UnifiedBooks(shape)
    places = books.pages.physical(np.array(books.pages.take(2)))
    assert places.dtype == np.int64 and int((places * layout.page_bytes)[0]) == page * layout.page_bytes > 2**32


def test_a_refused_taking_changes_nothing() -> None:
    """G-31: a hundred refusals, and the counts are those of the start."""
    books = UnifiedBooks(SHAPE)
    pages, slots = books.pages.take(6), [books.slots.take() for _ in range(4)]
    books.slots.release(slots.pop(0))
    before = (books.pages.num_free, books.slots.num_free, books.free_gap_bytes())
    assert before == (3, 3, 2 * 128)
    for _ in range(100):
        with pytest.raises(PoolExhausted, match="4 KV pages wanted, 3 fit"):
            books.pages.take(4)
    assert (books.pages.num_free, books.slots.num_free, books.free_gap_bytes()) == before
    assert books.take_moves() == [] and not books.is_cramped
    audit(books, [Holding("a", pages, slots)])


def test_nothing_moves_while_a_step_is_in_flight() -> None:
    books = UnifiedBooks(SHAPE)
    pages, slots = books.pages.take(6), [books.slots.take() for _ in range(6)]
    books.slots.release(slots[0])
    books.freeze()
    books.freeze()
    books.thaw()
    assert not books.has_room(1, 0) and books.is_cramped and books.pages.num_free == 0
    assert books.has_room(0, 1) and books.slots.num_free == 1, "a hole is filled without a move"
    books.pages.release(pages[-1:])
    assert books.pages.take(1) and books.take_moves() == [], "what comes back at the border is room"
    books.thaw()
    assert books.has_room(1, 0)
    books.pages.take(1)
    assert books.take_moves() == [BookMove("slot", 6, 1)]
    with pytest.raises(LeakError, match="thawed"):
        books.thaw()


def test_misuse_is_named_and_changes_nothing() -> None:
    books = UnifiedBooks(SHAPE)
    first, second = books.pages.take(2)
    slot = books.slots.take()
    books.pages.release([second])
    for call, what in (
        (lambda: books.pages.release([first, first]), f"page {first} was released twice"),
        (lambda: books.pages.release([first, second]), f"page {second} was released twice"),
        (lambda: books.pages.share([first, second]), "cannot be shared"),
        (lambda: books.hold([second], []), "cannot be held"),
        (lambda: books.unhold([first], []), "is not held"),
        (lambda: books.unhold([], [slot]), "is not held"),
        (lambda: books.pages.release([0]), "outside"),
        (lambda: books.slots.release(13), "outside"),
        (lambda: books.pages.holders(13), "outside"),
    ):
        with pytest.raises(LeakError, match=what):
            call()
        audit(books, [Holding("a", [first], [slot])])


def _set_pending(region: Region) -> None:
    region.num_pending = 1


def _set_extent(region: Region) -> None:
    region.extent = 12


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_set_pending, "miscounted"),
        (_set_extent, "overlap"),
        (lambda region: region._holes.clear(), "holes are lost"),
        (lambda region: region._physical.__setitem__(1, 3), "disagree"),
        (lambda region: region._free_ids.append(1), "not all"),
        (lambda region: region._physical.__setitem__(-1, 2), "sentinels"),
    ],
)
def test_the_audit_counts_the_tables_anew(damage: Callable[[Region], None], what: str) -> None:
    books = UnifiedBooks(SHAPE)
    books.pages.take(3)
    slots = [books.slots.take() for _ in range(3)]
    books.slots.release(slots[1])
    assert books.faults() == []
    damage(books._slots)
    with pytest.raises(LeakError, match=what):
        audit(books, [])


def test_a_kind_without_bytes_is_bounded_by_its_limit_only() -> None:
    no_pages = UnifiedBooks(UnifiedShape(ArenaLayout(small_shape().layout.slot_parts, None, 4), 128 * 4, page_limit=50))
    assert (no_pages.slots.num_free, no_pages.pages.num_free) == (3, 50)
    assert no_pages.has_room(50, 3) and not no_pages.has_room(51, 0) and not no_pages.has_room(0, 4)
    no_slots = UnifiedBooks(UnifiedShape(ArenaLayout((), Part((1, 2), torch.float32), 4), 640, slot_limit=5))
    assert (no_slots.slots.num_free, no_slots.pages.num_free) == (5, 19)
    for books in (no_pages, no_slots):
        pages, slots = books.pages.take(books.pages.num_free), [books.slots.take() for _ in range(3)]
        books.hold(pages[:2], slots[:1])
        books.pages.release(pages[1:])
        audit(books, [Holding("a", pages[:1], slots)])
        assert books.faults() == [] and books.num_moves == 0
    with pytest.raises(ValueError, match="page_limit"):
        UnifiedShape(ArenaLayout(small_shape().layout.slot_parts, None, 4), 1000)


def test_taken_and_given_back_places_do_not_pile_up() -> None:
    books = UnifiedBooks(SHAPE)
    for _ in range(500):
        pages = books.pages.take(3)
        books.pages.release(pages[:2])
        books.pages.release(pages[2:])
    assert len(books._pages._holes) < 100
