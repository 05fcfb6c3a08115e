"""A picture of a replay: what fills the pool, the gap that is left, moves, and hits over time.

In: a Replayed. Out: a PNG or SVG file. Needs matplotlib (extra `train`), imported only here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baltoro.bench.replay import Replayed
from baltoro.errors import ConfigError

GIB = 2**30


def plot_replay(found: Replayed, path: Path, title: str) -> None:
    """Three plots above each other, over the seconds of the replay. Errors: ConfigError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib: pip install 'baltoro[train]'") from error
    if not found.samples:
        raise ConfigError("the trace made no step: there is nothing to plot")
    figure = Figure(figsize=(9, 9), layout="constrained")
    pool, gap, hits = figure.subplots(3, 1, sharex=True)
    _draw_pool(pool, found)
    _draw_gap(gap, found)
    _draw_hits(hits, found)
    hits.set_xlabel("seconds")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_pool(axes: Any, found: Replayed) -> None:
    """Bytes in use, and those of them that the tree holds: slots from below, pages from above, as in the arena."""
    plan, samples = found.plan, found.samples
    times = [one.time_s for one in samples]
    total = plan.arena_bytes / GIB
    slots = [one.slots * plan.slot_bytes / GIB for one in samples]
    tree_slots = [one.tree_states * plan.slot_bytes / GIB for one in samples]
    pages = [total - one.pages * plan.page_bytes / GIB for one in samples]
    tree_pages = [total - one.tree_pages * plan.page_bytes / GIB for one in samples]
    axes.fill_between(times, 0, slots, color="tab:blue", alpha=0.7, step="post", label="slots")
    axes.fill_between(times, 0, tree_slots, color="tab:cyan", step="post", label="of these in the tree")
    axes.fill_between(times, pages, total, color="tab:red", alpha=0.7, step="post", label="pages")
    axes.fill_between(times, tree_pages, total, color="tab:orange", step="post", label="of these in the tree")
    axes.set(ylabel="arena, GiB", ylim=(0, total))
    axes.legend(loc="center", fontsize="small")


def _draw_gap(axes: Any, found: Replayed) -> None:
    times = [one.time_s for one in found.samples]
    axes.plot(
        times,
        [one.gap_bytes / GIB for one in found.samples],
        color="tab:green",
        drawstyle="steps-post",
        linewidth=0.8,
        label="free gap",
    )
    axes.set(ylabel="free gap, GiB", ylim=(0, None))
    right = axes.twinx()
    right.plot(
        times,
        [one.moves for one in found.samples],
        color="tab:grey",
        drawstyle="steps-post",
        linewidth=0.8,
        label="moves",
    )
    right.set(ylabel="moves in all", ylim=(0, None))
    axes.legend(loc="upper left", fontsize="small")
    right.legend(loc="upper right", fontsize="small")


def _draw_hits(axes: Any, found: Replayed) -> None:
    times = [one.time_s for one in found.samples]
    share = [one.hit_tokens / max(1, one.lookup_tokens) for one in found.samples]
    axes.plot(
        times,
        share,
        color="tab:purple",
        drawstyle="steps-post",
        linewidth=1.0,
        label="prompt tokens found, share so far",
    )
    axes.set(ylabel="share", ylim=(0, 1))
    right = axes.twinx()
    right.plot(
        times,
        [one.running for one in found.samples],
        color="tab:blue",
        drawstyle="steps-post",
        linewidth=0.6,
        label="running",
    )
    right.plot(
        times,
        [one.waiting for one in found.samples],
        color="tab:brown",
        drawstyle="steps-post",
        linewidth=0.6,
        label="waiting",
    )
    right.plot(
        times,
        [one.retractions for one in found.samples],
        color="black",
        drawstyle="steps-post",
        linewidth=0.8,
        label="retractions",
    )
    right.set(ylabel="requests", ylim=(0, None))
    axes.legend(loc="upper left", fontsize="small")
    right.legend(loc="upper right", fontsize="small")
