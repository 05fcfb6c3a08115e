"""Timing on a CUDA device: replays of a captured graph, medians, and the device's own ceilings.

In: a function that launches work on the current stream, without reading from the device. Out: microseconds.
Method: warm-up first, so that compilation stays out; each sample is one event pair around `inner` replays.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baltoro.errors import BaltoroError

# What other people's code raises where it was not built for this machine; a wrong result of theirs is among it.
PEER_FAULTS = (
    ImportError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, OSError,
    ArithmeticError, BaltoroError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device reached in this run: bytes/s of a copy (read + written), flop/s of a bf16 matrix product."""

    bytes_per_s: float
    flops_per_s: float

    def floor_us(self, num_bytes: float, flops: float = 0.0) -> float:
        """The longer of moving the bytes and doing the operations."""
        return 1e6 * max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table.

    time_us   median, graph replay
    floor_us  from the ceilings of the run
    error     relative distance from the reference; None for a peer that computes something else
    peers     name -> time_us
    """

    name: str
    time_us: float
    floor_us: float
    error: float | None
    peers: dict[str, float]

    @property
    def over_floor(self) -> float:
        return self.time_us / self.floor_us


def add_peer(peers: dict[str, float], name: str, measure: Callable[[], float]) -> None:
    """`measure()` under `name`, in microseconds; a peer that cannot run here says why and leaves no figure."""
    try:
        peers[name] = measure()
    except PEER_FAULTS as error:
        warnings.warn(f"{name} did not run: {type(error).__name__}: {str(error)[:300]}", stacklevel=2)


def graph_us(launch: Callable[[], object], *, samples: int = 15, inner: int = 10) -> float:
    """Median time of `launch` replayed from a graph. It must be capturable."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return _median_us(graph.replay, samples, inner)


def wall_or_graph_us(work: Callable[[], object], is_captured: bool) -> float:
    """Median time of `work`: replayed from a graph, or called, with all that the host does."""
    if is_captured and torch.cuda.is_available():
        return graph_us(work, samples=9, inner=10)
    found = []
    for _ in range(7):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(1e6 * (time.perf_counter() - began))
    return statistics.median(found[2:])


def _median_us(launch: Callable[[], object], samples: int, inner: int) -> float:
    found: list[float] = []
    for _ in range(samples + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(inner):
            launch()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / inner)
    return statistics.median(found[2:])


def ceilings() -> Ceilings:
    """A copy of 1 GiB, and a bf16 product of 8192^3, on random data."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us = _median_us(lambda: target.copy_(source), 15, 5)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_us = _median_us(lambda: torch.mm(a, b), 15, 3)
    return Ceilings(2 * source.numel() / copy_us * 1e6, 2 * 8192**3 / product_us * 1e6)
