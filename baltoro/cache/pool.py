"""One arena of bytes: state slots from its low end, KV pages from its high end, one border between them.

    | page 0 | slot 0 | slot 1 | slot 2 | ...     border     ... | page P-2 | page P-1 |

In: a shape, which says where everything lies (`shape.py`). Out: strided views that a forward reads and writes, copies.
Invariants: slot 0 and page 0 are sinks that nobody owns. Offsets are 64 bits wide. Copies in one call count as made one
after the other. A reader that starts at position 0 ignores what it finds in a slot, and rows past the length of a
request are masked by select; the tests run with every free byte NaN to prove it.
Not here: who owns what and which copies a moved border needs (`books.py`, `unified.py`), when copies happen
(`engine/scheduler.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from baltoro.cache.arena import Arena
from baltoro.cache.shape import ArenaShape, UnifiedShape
from baltoro.kernels.dispatch import kernels_for

POISON = 0xFF  # a float of any width whose bytes are all ones is NaN
BATCH_BYTES = 32 * 2**20  # of blocks that are copied at once: as much is needed in between


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


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
