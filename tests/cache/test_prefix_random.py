"""The prefix tree under random operations of several requests, compared with plain dictionaries after each."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baltoro.cache.books import Books, FixedBooks
from baltoro.cache.grid import Grid
from baltoro.cache.retention import Interval, PromptEnd, Retention, SecondHit, Turns
from baltoro.cache.shape import ArenaLayout, Part, UnifiedShape
from baltoro.cache.unified import UnifiedBooks
from tests.cache.tree_world import World


def new_world(random: Random) -> World:
    """A small world of any shape: pages shorter and longer than an endpoint, models of one kind of state or two."""
    endpoint, chunk = random.choice((1, 2, 4)), random.choice((1, 2, 4, 6))
    step = math.lcm(chunk, endpoint)
    grid = Grid(chunk, endpoint, step * random.choice((1, 2)))
    page_size = random.choice([*(size for size in (1, 2, 4) if endpoint % size == 0), endpoint * 2, endpoint * 3])
    policies: list[Retention] = [Turns(), Turns(2), Interval(grid.interval), PromptEnd(), SecondHit()]
    has_states = random.random() < 0.85
    has_pages = not has_states or random.random() < 0.85
    is_unified = random.random() < 0.5
    num_pages, num_slots = random.randint(6, 60 // page_size + 8), random.randint(2, 8)
    books: Books
    if is_unified and random.random() < 0.7:
        books = UnifiedBooks(shape_of(num_pages, num_slots))
    else:
        books = FixedBooks(random.choice((1, 3)), num_pages, num_slots)
    options = {"has_states": has_states, "has_pages": has_pages, "is_unified": is_unified}
    return World(random, books, grid, page_size, random.choice(policies), **options)


def shape_of(num_pages: int, num_slots: int) -> UnifiedShape:
    """An arena in which a slot is as large as three pages, with room for about so many of both."""
    slot, row = Part((48,), torch.float32), Part((16,), torch.float32)
    layout = ArenaLayout((slot,), row, 1)
    return UnifiedShape(layout, (num_pages + 2) * layout.page_bytes + (num_slots + 2) * layout.slot_bytes)


def live(random: Random, num_operations: int) -> Counter[str]:
    world = new_world(random)
    for _ in range(num_operations):
        world.act()
    world.close()
    return world.seen


@given(st.randoms(use_true_random=False), st.integers(0, 40))
@settings(max_examples=25, deadline=None)
def test_tree_is_what_the_dictionaries_say(random: Random, num_operations: int) -> None:
    """Few operations, but what fails is made small."""
    live(random, num_operations)


@pytest.mark.slow
def test_ten_thousand_operations() -> None:
    seen = sum((live(Random(seed), 100) for seed in range(100)), Counter())
    for event in (
        "hit",
        "superseded",
        "shared leaf",
        "evicted leaf",
        "evicted state",
        "flush",
        "drop",
        "too late",
        "cramped",
    ):
        assert seen[event] >= 10, f"{event} hardly happened: {seen}"


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(10))
def test_hundred_thousand_operations(block: int) -> None:
    for seed in range(100):
        live(Random(1000 + 100 * block + seed), 100)
