"""Adds the pools up: every page and slot has the owners the books think it has, and nobody else.

In: the books, and what each owner says it holds. Out: nothing, or LeakError with the difference.
The owners' lists are the second, independent account: books that are only consistent with themselves prove nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baltoro.cache.books import Books
from baltoro.errors import LeakError


@dataclass(frozen=True, slots=True)
class Holding:
    """What one owner holds, in its own words: virtual ids, each at most once."""

    owner: str
    pages: Sequence[int]
    slots: Sequence[int] = ()


def audit(books: Books, holdings: Iterable[Holding]) -> None:
    """Compare the books with the holdings of all owners. Errors: LeakError naming ids and owners."""
    held_pages: Counter[int] = Counter()
    owners: dict[int, str] = {}
    faults = books.faults()
    for holding in holdings:
        if len(set(holding.pages)) != len(holding.pages):
            faults.append(f"{holding.owner} lists a page twice: {sorted(holding.pages)}")
        held_pages.update(holding.pages)
        for slot in holding.slots:
            if slot in owners:
                faults.append(f"slot {slot} has two owners: {owners[slot]} and {holding.owner}")
            owners[slot] = holding.owner
    used = books.pages.used_ids()
    faults += _differences("page", used, held_pages.keys())
    for page in used:
        if held_pages[page] and books.pages.holders(page) != held_pages[page]:
            faults.append(f"page {page} is booked for {books.pages.holders(page)} holders, {held_pages[page]} claim it")
    faults += _differences("slot", books.slots.used_ids(), owners.keys())
    if faults:
        raise LeakError("; ".join(faults))


def _differences(kind: str, used: Iterable[int], held: Iterable[int]) -> list[str]:
    """What the books call taken and what the owners claim must be the same ids."""
    booked, claimed, faults = set(used), set(held), []
    if booked - claimed:
        faults.append(f"{kind}s {sorted(booked - claimed)}: leaked: taken, but nobody claims them")
    if claimed - booked:
        faults.append(f"{kind}s {sorted(claimed - booked)}: claimed, but free or no such id")
    return faults
