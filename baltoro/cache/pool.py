"""One arena of bytes: state slots from its low end, KV pages from its high end, one border between them.

    bytes 0                                                                total_bytes
    | page 0 | slot 0 | slot 1 | slot 2 | ...     border     ... | page P-2 | page P-1 |
      sink     sink

Both kinds are indexed over the whole arena: slot u lies at `slots_base + u * slot_bytes`, page p at `p * page_bytes`.
Which ids may be handed out is the business of the books (`books.py`), so the border is only a number: fixed in an
`ArenaShape`, anywhere in a `UnifiedShape`, whose views name every slot and every page that the bytes could hold.
A slot is one stretch of bytes that holds all its parts, and of a part the bytes of one head of one layer are one
stretch; a page is one stretch, token-major: position, then the row of every layer. Moving or sending one is one copy.

In: an ArenaLayout (shapes, from the planner) and the counts. Out: strided views that a forward reads and writes.
Invariants: slot 0 and page 0 are sinks that nobody owns. Offsets are 64 bits wide. Copies in one call count as made one
after the other. A reader that starts at position 0 ignores what it finds in a slot, and rows past the length of a
request are masked by select; the tests run with every free byte NaN to prove it.
Not here: who owns what and which copies a moved border needs (`books.py`, `unified.py`), when copies happen
(`engine/scheduler.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from baltoro.cache.arena import Arena
from baltoro.errors import ConfigError
from baltoro.kernels.dispatch import kernels_for

ALIGNMENT = 64  # bytes; every part of a slot, and every slot, starts on a multiple
POISON = 0xFF  # a float of any width whose bytes are all ones is NaN
BATCH_BYTES = 32 * 2**20  # of blocks that are copied at once: as much is needed in between


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor inside a slot, or one row of a page."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """What one slot and one page hold. A model without states has no slot parts, one without KV has no row."""

    slot_parts: tuple[Part, ...]
    row: Part | None
    page_size: int
    part_offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Byte offset of each slot part, and the slot's size as the last entry."""
    slot_bytes: int = field(init=False, repr=False, compare=False)
    page_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        offsets = [0]
        for part in self.slot_parts:
            offsets.append(_align(offsets[-1] + part.num_bytes))
        object.__setattr__(self, "part_offsets", tuple(offsets))
        object.__setattr__(self, "slot_bytes", offsets[-1])
        object.__setattr__(self, "page_bytes", 0 if self.row is None else self.page_size * self.row.num_bytes)


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """Where slots and pages lie for `num_slots` and `num_pages` that can be handed out (sinks come on top)."""

    layout: ArenaLayout
    num_slots: int
    num_pages: int

    @property
    def slots_base(self) -> int:
        """First byte of slot 0; page 0 lies before it."""
        return _align(self.layout.page_bytes)

    @property
    def first_page(self) -> int:
        """Lowest page id that can be handed out: the first one that lies wholly behind the slots."""
        if not self.layout.page_bytes or not self.layout.slot_bytes:
            return 1
        slots_end = self.slots_base + (self.num_slots + 1) * self.layout.slot_bytes
        return max(1, -(-slots_end // self.layout.page_bytes))

    @property
    def total_bytes(self) -> int:
        if not self.layout.page_bytes:
            return self.slots_base + (self.num_slots + 1) * self.layout.slot_bytes
        return _align((self.first_page + self.num_pages) * self.layout.page_bytes)

    @property
    def num_slot_ids(self) -> int:
        return self.num_slots + 1

    @property
    def num_page_ids(self) -> int:
        return self.first_page + self.num_pages


@dataclass(frozen=True, slots=True)
class UnifiedShape:
    """Where slots and pages can lie in an arena of `budget_bytes` without a border: ids count over all of it.

    `slot_limit`, `page_limit`: more than so many are never handed out; a kind without bytes needs one.
    Errors: ConfigError if not even the sinks fit.
    """

    layout: ArenaLayout
    budget_bytes: int
    slot_limit: int | None = None
    page_limit: int | None = None

    def __post_init__(self) -> None:
        if not self.layout.slot_bytes and self.slot_limit is None:
            raise ValueError("slots of no bytes need a slot_limit")
        if not self.layout.page_bytes and self.page_limit is None:
            raise ValueError("pages of no bytes need a page_limit")
        if self.slots_end(0) > self.pages_start(0):
            raise ConfigError(
                f"{self.budget_bytes} bytes hold no state slot of {self.layout.slot_bytes} bytes beside a KV page of "
                f"{self.layout.page_bytes}: raise memory_bytes"
            )

    @property
    def total_bytes(self) -> int:
        return self.budget_bytes // ALIGNMENT * ALIGNMENT

    @property
    def slots_base(self) -> int:
        """First byte of slot 0; page 0 lies before it."""
        return _align(self.layout.page_bytes)

    @property
    def num_page_ids(self) -> int:
        """Page ids of the whole arena, the sink and those under the slots included."""
        if self.layout.page_bytes:
            return self.total_bytes // self.layout.page_bytes
        return (self.page_limit or 0) + 1

    @property
    def num_slot_ids(self) -> int:
        return self.max_slots + 1

    @property
    def max_slots(self) -> int:
        """Slots that fit if there is no page."""
        return self.slots_beside(0)

    @property
    def max_pages(self) -> int:
        """Pages that fit if there is no slot."""
        return self.pages_beside(0)

    def slots_end(self, count: int) -> int:
        """First byte behind slots 0..count."""
        if not self.layout.slot_bytes:
            return self.layout.page_bytes
        return self.slots_base + (count + 1) * self.layout.slot_bytes

    def pages_start(self, count: int) -> int:
        """First byte of the last `count` pages."""
        if not self.layout.page_bytes:
            return self.total_bytes
        return (self.num_page_ids - count) * self.layout.page_bytes

    def slots_beside(self, num_pages: int) -> int:
        """Slots that fit beside the last `num_pages` pages."""
        limit, slot_bytes = self.slot_limit, self.layout.slot_bytes
        if not slot_bytes:
            return limit or 0
        fits = (self.pages_start(num_pages) - self.slots_base) // slot_bytes - 1
        return fits if limit is None else min(fits, limit)

    def pages_beside(self, num_slots: int) -> int:
        """Pages that fit beside slots 1..num_slots."""
        limit, page_bytes = self.page_limit, self.layout.page_bytes
        if not page_bytes:
            return limit or 0
        fits = self.num_page_ids + -self.slots_end(num_slots) // page_bytes
        return fits if limit is None else min(fits, limit)


class Pool:
    """The arena. Written by forwards through its views, and by the runner through the copies of a plan.

    `arena`: uint8 [shape.total_bytes] that exists already (a file, shared memory); without it `memory` owns the bytes,
    which can then be given back for a while.
    """

    def __init__(
        self,
        shape: ArenaShape | UnifiedShape,
        device: str | torch.device = "cpu",
        *,
        arena: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.layout = shape.layout
        self.memory = Arena(shape.total_bytes, device) if arena is None else None
        self.arena = self.memory.bytes if self.memory is not None else cast(Tensor, arena)
        self._copy_blocks = kernels_for(self.arena.device).copy_blocks
        self._slots = self._blocks(shape.num_slot_ids, shape.layout.slot_bytes, shape.slots_base)
        self._pages = self._blocks(shape.num_page_ids, shape.layout.page_bytes, 0)

    def _blocks(self, count: int, num_bytes: int, base: int) -> Tensor:
        """[count, words] over blocks of `num_bytes` from byte `base`, in the widest words that they are made of."""
        size = math.gcd(num_bytes, base, self.arena.numel(), 8)
        words = self.arena.view({8: torch.int64, 4: torch.int32, 2: torch.int16}.get(size, torch.int8))
        return words.as_strided((count, num_bytes // size), (num_bytes // size, 1), base // size)

    def slot_views(self) -> tuple[Tensor, ...]:
        """Per slot part, [U, *part.shape]; U counts the sink."""
        views, layout = [], self.layout
        for part, offset in zip(layout.slot_parts, layout.part_offsets, strict=False):
            size = part.dtype.itemsize
            strides = (layout.slot_bytes // size, *_contiguous_strides(part.shape))
            base = (self.shape.slots_base + offset) // size
            views.append(self.arena.view(part.dtype).as_strided((self.shape.num_slot_ids, *part.shape), strides, base))
        return tuple(views)

    def row_view(self) -> Tensor | None:
        """[P, page_size, *row.shape]; P counts every page id of the arena, also those that lie under the slots."""
        row = self.layout.row
        if row is None:
            return None
        shape = (self._pages.shape[0], self.layout.page_size, *row.shape)
        return self.arena.view(row.dtype).as_strided(shape, _contiguous_strides(shape), 0)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Every byte of slots, for all layers, one after the other: a target may be the source of a later pair."""
        self._copy(self._slots, sources, targets)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Every byte of pages, for all layers, one after the other: a target may be the source of a later pair."""
        self._copy(self._pages, sources, targets)

    def copy_slot(self, source: int, target: int) -> None:
        self.copy_slots((source,), (target,))

    def copy_page(self, source: int, target: int) -> None:
        self.copy_pages((source,), (target,))

    def copy_page_rows(self, source: int, target: int, num_rows: int) -> None:
        """The first `num_rows` positions of a page, for all layers; the others of `target` stay as they are."""
        if self.layout.row is None:
            return
        row_bytes, page_bytes = self.layout.row.num_bytes, self.layout.page_bytes
        first, second, length = source * page_bytes, target * page_bytes, num_rows * row_bytes
        self.arena[second : second + length] = self.arena[first : first + length]

    def zero_pages(self, pages: Sequence[int]) -> None:
        """What pages held before their new owner is gone."""
        if pages and self._pages.shape[1]:
            self._pages.index_fill_(0, self._index(pages), 0)

    def poison(self) -> None:
        """Fill everything with NaN: a debugging aid."""
        self.arena.fill_(POISON)

    def poison_ids(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        """Fill these pages and slots with NaN: what a new owner finds must not matter."""
        for page in pages:
            self._pages[page] = -1  # all bytes POISON, in words of any width
        for slot in slots:
            self._slots[slot] = -1

    def _copy(self, blocks: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
        num_bytes = blocks.shape[1] * blocks.element_size()
        if not num_bytes:
            return
        for first, last in _batches(sources, targets, max(1, BATCH_BYTES // num_bytes)):
            if last == first + 1:
                blocks[targets[first]] = blocks[sources[first]]
                continue
            index = self._index([*sources[first:last], *targets[first:last]])  # one way to the device
            self._copy_blocks(blocks, index[: last - first], index[last - first :])

    def _index(self, ids: Sequence[int]) -> Tensor:
        """int64 on the arena's device, without waiting for it."""
        index = torch.tensor(ids, dtype=torch.int64)
        if self.arena.is_cuda:
            return index.pin_memory().to(self.arena.device, non_blocking=True)
        return index.to(self.arena.device)


def _batches(sources: Sequence[int], targets: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Cut pairs into runs [first, last) that may be made in any order: no pair reads or writes what an earlier one of
    the run has written, or writes what an earlier one reads."""
    first, written, read = 0, set[int](), set[int]()
    for at, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source in written or target in written or target in read or at - first == most:
            yield first, at
            first, written, read = at, set(), set()
        written.add(target)
        read.add(source)
    if first < len(targets):
        yield first, len(targets)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
