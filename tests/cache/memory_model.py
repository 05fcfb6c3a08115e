"""A dictionary that knows what every block of a unified arena must hold, and a small real arena to compare it with.

Every operation is done on the books, the moves that it lists are made on real bytes, and then everything is compared:
each block's content, each held block's place, the books' own counts, and what still fits, found by trying every border.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import groupby

import numpy as np
import pytest
import torch

from baltoro.cache.audit import Holding, audit
from baltoro.cache.pool import Pool
from baltoro.cache.shape import ArenaLayout, Part, UnifiedShape
from baltoro.cache.unified import UnifiedBooks
from baltoro.errors import LeakError, PoolExhausted

SLOT_PARTS = (Part((2, 3), torch.float64), Part((5,), torch.float32))  # 48 and 20 bytes, 128 with alignment
SINK = -5

Block = tuple[str, int]


def small_shape(
    num_bytes: int = 1800, page_size: int = 5, parts: tuple[Part, ...] = SLOT_PARTS, **limits: int
) -> UnifiedShape:
    """Pages of 40 bytes: their borders and those of the slots meet rarely."""
    return UnifiedShape(ArenaLayout(parts, Part((1, 2), torch.float32), page_size), num_bytes, **limits)


class MemoryModel:
    """Content by (kind, virtual id); `audited` compares everything and is called after each operation."""

    def __init__(self, shape: UnifiedShape) -> None:
        self.shape, self.books, self.pool = shape, UnifiedBooks(shape), Pool(shape)
        self.pool.poison()
        self.words = self.pool.arena.view(torch.int64).numpy()
        self._bytes_of("slot", 0)[:] = self._bytes_of("page", 0)[:] = SINK
        self.slots_below = [
            (page * shape.layout.page_bytes - shape.slots_base) // shape.layout.slot_bytes - 1
            for page in range(shape.num_page_ids)
        ]  # slots that end before each page
        self.content: dict[Block, int] = {}
        self.holders: Counter[Block] = Counter()
        self.holds: Counter[Block] = Counter()
        self.held_at: dict[Block, int] = {}
        self.places: dict[Block, int] = {}
        self.num_frozen = 0
        self.num_written = self.num_refused = self.num_cramped = 0

    # ---- operations ----------------------------------------------------------------------------------------------
    def take_pages(self, count: int) -> None:
        could = self.fits(count, 0)
        try:
            pages = self.books.pages.take(count)
        except PoolExhausted:
            return self._refused(count, 0)
        assert could and len(set(pages)) == len(pages) == count
        self._taken([("page", page) for page in pages])

    def take_slot(self) -> None:
        could = self.fits(0, 1)
        try:
            slot = self.books.slots.take()
        except PoolExhausted:
            return self._refused(0, 1)
        assert could
        self._taken([("slot", slot)])

    def share(self, pages: list[int]) -> None:
        self.books.pages.share(pages)
        self.holders.update(("page", page) for page in pages)
        self.audited()

    def release(self, blocks: list[Block]) -> None:
        self.books.pages.release([block for kind, block in blocks if kind == "page"])
        for kind, block in blocks:
            if kind == "slot":
                self.books.slots.release(block)
            self.holders[kind, block] -= 1
            self._forget((kind, block))
        self.audited()

    def hold(self, blocks: list[Block]) -> None:
        self.books.hold(*_by_kind(blocks))
        for block in blocks:
            self.holds[block] += 1
            self.held_at[block] = self.place(block)
        self.audited()

    def unhold(self, blocks: list[Block]) -> None:
        self.books.unhold(*_by_kind(blocks))
        for block in blocks:
            self.holds[block] -= 1
            if not self.holds[block]:
                del self.held_at[block]
            self._forget(block)
        self.audited()

    def freeze(self) -> None:
        """Between `freeze` and `thaw` every block is held."""
        self.books.freeze()
        self.num_frozen += 1
        self.audited()

    def thaw(self) -> None:
        self.books.thaw()
        self.num_frozen -= 1
        self.audited()

    def ask(self, num_pages: int, num_slots: int) -> bool:
        """`has_room`, compared."""
        has_room = self.books.has_room(num_pages, num_slots)
        assert has_room == self.fits(num_pages, num_slots)
        is_cramped = not has_room and self.fits(num_pages, num_slots, is_loose=True)
        assert self.books.is_cramped == is_cramped
        assert not self.books.take_moves()
        return has_room

    # ---- the truth -----------------------------------------------------------------------------------------------
    def used(self) -> list[Block]:
        return [block for block in self.content if self.holders[block]]

    def held(self) -> list[Block]:
        return list(self.held_at)

    def place(self, block: Block) -> int:
        kind, number = block
        if kind == "slot":
            return self.books.slots.physical(number)
        found = self.books.pages.physical(np.array([number]))
        assert found.dtype == np.int64
        return int(found[0])

    def fits(self, num_pages: int, num_slots: int, *, is_loose: bool = False) -> bool:
        """Whether some border leaves room for all of both kinds, with everything held on its own side of it.
        `is_loose`: as if nothing were held."""
        blocks = self.used() if is_loose else self.content
        slots = num_slots + sum(kind == "slot" for kind, _ in blocks)
        pages = num_pages + len(blocks) + num_slots - slots
        if slots > self.shape.max_slots or pages > self.shape.max_pages:
            return False
        places = self.places if self.num_frozen else self.held_at
        held = [] if is_loose else [(block, at) for block, at in places.items() if block in self.content]
        slots = max([slots, *(at for (kind, _), at in held if kind == "slot")])
        first_held = min([len(self.slots_below), *(at for (kind, _), at in held if kind == "page")])
        first_page = bisect_left(self.slots_below, slots)  # the lowest border that leaves room for the slots
        return first_page <= first_held and pages <= len(self.slots_below) - first_page

    def audited(self) -> None:
        books = self.books
        pages = [block for kind, block in self.used() if kind == "page"]
        slots = [block for kind, block in self.used() if kind == "slot"]
        shares = Counter({block: count for (kind, block), count in self.holders.items() if kind == "page"})
        sharing = [
            Holding(str(n), [page for page in pages if shares[page] > n])
            for n in range(1, max(shares.values(), default=1))
        ]
        audit(books, [Holding("all", pages, slots), *sharing])
        assert (books.pages.num_used, books.slots.num_used) == (len(pages), len(slots))
        before, self.places = self.places, self._all_places()
        for block, tag in self.content.items():
            place = self.places[block]
            assert place == self.held_at.get(block, place), "a held block keeps its place"
            assert not self.num_frozen or place == before.get(block, place), "no block moves while the books are frozen"
            assert (self._bytes_of(block[0], place) == tag).all(), f"{block} lost its bytes"
        assert (self._bytes_of("slot", 0) == SINK).all() and (self._bytes_of("page", 0) == SINK).all()
        pages_free, slots_free = books.pages.num_free, books.slots.num_free
        assert self.fits(pages_free, 0) and not self.fits(pages_free + 1, 0)
        assert self.fits(0, slots_free) and not self.fits(0, slots_free + 1)

    def _all_places(self) -> dict[Block, int]:
        pages = [block for block in self.content if block[0] == "page"]
        found = self.books.pages.physical(np.array([page for _, page in pages], dtype=np.int64))
        slots = {block: self.place(block) for block in self.content if block[0] == "slot"}
        return slots | dict(zip(pages, found.tolist(), strict=True))

    # ---- helpers -------------------------------------------------------------------------------------------------
    def _taken(self, blocks: list[Block]) -> None:
        self._move()
        for block in blocks:
            self.places.pop(block, None)
            assert block[1] >= 1 and block not in self.content
            self.num_written += 1
            self.content[block] = self.num_written
            self.holders[block] = 1
            self._bytes_of(block[0], self.place(block))[:] = self.num_written
        self.audited()

    def _refused(self, num_pages: int, num_slots: int) -> None:
        assert not self.fits(num_pages, num_slots), "refused although it fits"
        is_cramped = self.books.is_cramped
        assert is_cramped == self.fits(num_pages, num_slots, is_loose=True)
        assert not self.books.take_moves(), "a refused taking moves nothing"
        self.num_refused += 1
        self.num_cramped += is_cramped
        self.audited()

    def _move(self) -> None:
        moves = self.books.take_moves()
        sources, targets = ([(m.kind, m.source) for m in moves], [(m.kind, m.target) for m in moves])
        places = sources + targets
        assert len(set(places)) == len(places), "the moves of one taking share no place"
        for kind, run in groupby(moves, key=lambda move: move.kind):
            pairs = [(move.source, move.target) for move in run]
            copy = self.pool.copy_slots if kind == "slot" else self.pool.copy_pages
            copy(*zip(*pairs, strict=True))

    def _forget(self, block: Block) -> None:
        """A block that nobody has or reads any more is nowhere."""
        if self.holders[block] or self.holds[block] or block not in self.content:
            return
        del self.content[block], self.holders[block], self.holds[block]
        with pytest.raises(LeakError, match="free"):
            self.place(block)

    def _bytes_of(self, kind: str, place: int) -> np.ndarray:
        layout = self.shape.layout
        size, base = (layout.slot_bytes, self.shape.slots_base) if kind == "slot" else (layout.page_bytes, 0)
        start = (base + place * size) // 8
        return self.words[start : start + size // 8]


def _by_kind(blocks: list[Block]) -> tuple[list[int], list[int]]:
    return tuple([block for kind, block in blocks if kind == wanted] for wanted in ("page", "slot"))  # type: ignore[return-value]
