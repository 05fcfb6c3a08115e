"""Times of GPU work: CUDA-graph replays, and the copy bandwidth that floors are taken from.

In: a function that launches work on the current stream. Out: seconds, the median of replays of one captured graph.
A set of inputs that fits the L2 cache would be timed there: give `replay_seconds` several functions on different
memory, it captures them all into one graph and divides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

REPEATS, WARM_UPS = 25, 3
COPY_BYTES = 1 << 31


def replay_seconds(works: Sequence[Callable[[], object]], repeats: int = REPEATS) -> float:
    """Median seconds of one of `works`, captured together in one graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            for work in works:
                work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    for _ in range(WARM_UPS):
        graph.replay()
    return _median(graph.replay, repeats) / len(works)


def eager_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of plain calls, launches included: for peers that cannot be captured."""
    for _ in range(WARM_UPS):
        work()
    return _median(work, repeats)


def copy_bytes_per_second() -> float:
    """Read plus written, of a device-to-device copy that fits no cache. Not from a graph: there the copy engine takes
    it, which reached 2.7 TB/s on an H200 where plain calls reach 4.24."""
    source = torch.randint(0, 127, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / eager_seconds(lambda: target.copy_(source), repeats=9)


def _median(work: Callable[[], object], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(times)
