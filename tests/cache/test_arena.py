"""Memory that is given back and taken again: it is really gone, and comes back where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baltoro.cache.arena import Arena
from baltoro.observe import resident_bytes

SIZE = 48 << 20
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory: Linux alone")


@needs_proc
def test_the_memory_is_gone_and_comes_back_at_the_same_address() -> None:
    arena = Arena(SIZE, "cpu")
    view = arena.bytes.view(torch.int64)[1000:]
    address, empty = arena.bytes.data_ptr(), resident_bytes()
    for _ in range(3):
        arena.bytes.fill_(7)
        full = resident_bytes()
        assert full - empty > 0.95 * SIZE
        assert (arena.give_back(), arena.give_back(), arena.is_given_back) == (SIZE, 0, True)
        assert full - resident_bytes() > 0.95 * SIZE
        assert (arena.take(), arena.take(), arena.is_given_back) == (SIZE, 0, False)
        assert arena.bytes.data_ptr() == address
        view[3] = 11
        assert arena.bytes[8 * 1003] == 11


def test_storage_that_is_emptied_keeps_its_views() -> None:
    """The way of a GPU, on another device that has storages to empty."""
    arena = Arena(SIZE, "meta")
    view = arena.bytes.view(torch.int64)
    assert arena.give_back() == SIZE and arena.take() == SIZE
    assert view.untyped_storage().nbytes() == SIZE


def test_an_arena_of_no_bytes_is_no_trouble() -> None:
    arena = Arena(0, "cpu")
    assert (arena.give_back(), arena.take(), arena.bytes.numel()) == (0, 0, 0)
