"""What a captured step spends its time on: kernel by kernel, with the gaps between them.

In: a function, captured or eager. Out: one Slot a kernel, in the order they began, of one replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class Slot:
    """A kernel: microseconds since the first began, its length, and how long nothing ran before it (negative: it began
    while another was running)."""

    name: str
    start_us: float
    time_us: float
    gap_us: float


def timeline(work: Callable[[], object], replays: int = 4, *, is_captured: bool = True) -> list[Slot]:
    """The last of `replays` replays under the profiler. Empty if it saw no kernel."""
    run = _captured(work) if is_captured else work
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(replays):
            run()
        torch.cuda.synchronize()
    seen = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if not str(event.device_type).endswith("CPU") and not event.name.startswith(("Context", "cuda"))
    ]
    return slots(sorted(seen), replays)


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    """A graph's replay."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def slots(seen: list[tuple[float, float, str]], replays: int) -> list[Slot]:
    """Of (start, end, name), sorted, of equal replays: the last one's."""
    last = seen[len(seen) - len(seen) // max(1, replays) :]
    made, reached = [], last[0][0] if last else 0.0
    for start, end, name in last:
        made.append(Slot(name, start - last[0][0], end - start, start - reached))
        reached = max(reached, end)
    return made


def describe(found: list[Slot], width: int = 70) -> str:
    """A line a kernel, and the sums."""
    lines = [f"{one.start_us:8.1f} {one.time_us:7.1f} us, gap {one.gap_us:5.1f}  {one.name[:width]}" for one in found]
    whole = max((one.start_us + one.time_us for one in found), default=0.0)
    gaps = sum(max(0.0, one.gap_us) for one in found)
    return "\n".join([*lines, f"{len(found)} kernels in {whole:.1f} us, of which {gaps:.1f} us nothing ran"])


def heaviest(found: list[Slot], count: int = 3) -> list[tuple[str, int, float]]:
    """(name, launches, us in all) of the kernels that take most of the time, and first what nothing ran for."""
    sums: dict[str, tuple[int, float]] = {}
    for one in found:
        launches, time_us = sums.get(one.name, (0, 0.0))
        sums[one.name] = launches + 1, time_us + one.time_us
    gaps = [one.gap_us for one in found if one.gap_us > 0.0]
    ranked = sorted(((name, n, us) for name, (n, us) in sums.items()), key=lambda row: -row[2])
    return [("nothing ran", len(gaps), sum(gaps)), *ranked[:count]]
