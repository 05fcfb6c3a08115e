"""Memory that is given back and taken again: it is really gone, and comes back where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baltoro.cache.arena import Arena
from baltoro.observe import resident_bytes
from tests.engine.test_graphs import FakeBackend, answers, make_engine

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


@pytest.mark.gpu
def test_on_a_gpu_the_memory_goes_and_the_address_stays() -> None:
    arena = Arena(SIZE, "cuda")
    assert arena.keeps_address
    view, address = arena.bytes.view(torch.int64)[1000:], arena.bytes.data_ptr()
    graph = torch.cuda.CUDAGraph()
    view.zero_()
    with torch.cuda.graph(graph):
        view.add_(1)
    for _ in range(3):
        view.fill_(41)
        graph.replay()
        assert int(view[3]) == 42
        full = torch.cuda.mem_get_info()[0]
        assert (arena.give_back(), arena.give_back(), arena.is_given_back) == (SIZE, 0, True)
        assert torch.cuda.mem_get_info()[0] - full >= SIZE
        assert (arena.take(), arena.take(), arena.is_given_back) == (SIZE, 0, False)
        assert torch.cuda.mem_get_info()[0] - full < SIZE
        assert arena.bytes.data_ptr() == address


def test_graphs_keep_an_arena_that_would_move() -> None:
    """Without stable addresses an engine with captured steps gives nothing back, and works on."""
    engine = make_engine()
    engine.runner.capture(4, 20, FakeBackend())
    memory = engine.pool.memory
    assert memory is not None
    expected = answers(engine)
    memory.keeps_address = False
    assert engine.sleep()["given_back_bytes"] == 0 and engine.wake()["taken_bytes"] == 0
    assert answers(engine) == expected
    memory.keeps_address = True
    assert engine.sleep()["given_back_bytes"] == engine.wake()["taken_bytes"] > 0
    assert answers(engine) == expected
