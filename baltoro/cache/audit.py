"""Adds the pools up: every page and slot has the owners the books think it has, and nobody else.

In: the books, and what each owner says it holds. Out: nothing, or LeakError with the difference.
The owners' lists are the second, independent account: books that are only consistent with themselves prove nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baltoro.cache.pages import PageBook
from baltoro.cache.slots import SlotBook
from baltoro.errors import LeakError


@dataclass(frozen=True, slots=True)
class Holding:
    """What one owner holds, in its own words."""

    owner: str
    pages: Sequence[int]
    slot: int | None


def audit(pages: PageBook, slots: SlotBook, holdings: Iterable[Holding]) -> None:
    """Compare the books with the holdings of all owners. Errors: LeakError naming ids and owners."""
    held_pages: Counter[int] = Counter()
    held_slots: dict[int, str] = {}
    faults = []
    for holding in holdings:
        if len(set(holding.pages)) != len(holding.pages):
            faults.append(f"{holding.owner} lists a page twice: {sorted(holding.pages)}")
        held_pages.update(holding.pages)
        if holding.slot is None:
            continue
        if holding.slot in held_slots:
            faults.append(f"slot {holding.slot} has two owners: {held_slots[holding.slot]} and {holding.owner}")
        held_slots[holding.slot] = holding.owner
    faults += _page_faults(pages, held_pages)
    faults += _set_faults("slot", set(slots.free_ids()), len(slots.free_ids()), set(held_slots), 1, slots.count)
    if faults:
        raise LeakError("; ".join(faults))


def _page_faults(pages: PageBook, held: Counter[int]) -> list[str]:
    free = pages.free_ids()
    faults = _set_faults("page", set(free), len(free), set(held), pages.first, pages.count)
    for page in range(pages.first, pages.first + pages.count):
        if pages.holders(page) != held[page]:
            faults.append(f"page {page} is booked for {pages.holders(page)} holders, {held[page]} claim it")
    return faults


def _set_faults(kind: str, free: set[int], num_free: int, held: set[int], first: int, count: int) -> list[str]:
    """Free and held must be disjoint and together be first..first+count-1."""
    every = set(range(first, first + count))
    faults = []
    if num_free != len(free):
        faults.append(f"the free list of {kind}s holds {num_free - len(free)} of them twice")
    for name, ids in (
        ("free and held at once", free & held),
        ("leaked: neither free nor held", every - free - held),
        ("no such id", (free | held) - every),
    ):
        if ids:
            faults.append(f"{kind}s {sorted(ids)}: {name}")
    return faults
