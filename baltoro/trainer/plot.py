"""Pictures of a run: loss, and expert load, from its `metrics.jsonl`.

In: the run's folder. Out: `loss.png` and `load.png` in it. Needs matplotlib (extra `train`), imported only here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from baltoro.errors import ConfigError
from baltoro.trainer.loop import METRICS


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's log. Errors: ConfigError if there are none."""
    path = out / METRICS
    lines = path.read_text().splitlines() if path.is_file() else []
    if not lines:
        raise ConfigError(f"{path} has no lines to plot")
    return [json.loads(line) for line in lines]


def plot_run(out: Path) -> list[Path]:
    """Draw the pictures; returns their paths. Errors: ConfigError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib: pip install 'baltoro[train]'") from error
    lines = read_metrics(out)
    loss = Figure(figsize=(8, 4.5), layout="constrained")
    _draw_loss(loss.add_subplot(), lines)
    load = Figure(figsize=(8, 4.5), layout="constrained")
    _draw_load(load.add_subplot(), lines)
    paths = [out / "loss.png", out / "load.png"]
    for figure, path in zip((loss, load), paths, strict=True):
        figure.savefig(path, dpi=110)
    return paths


def _draw_loss(axes: Any, lines: Sequence[dict[str, Any]]) -> None:
    for source in sorted({name for line in lines for name in line["sources"]}):
        points = [(line["total_tokens"], line["sources"][source]) for line in lines if source in line["sources"]]
        axes.plot(*zip(*points, strict=True), linewidth=0.6, alpha=0.6, label=source)
        held_out = [(line["total_tokens"], line["held_out"][source]) for line in lines if "held_out" in line]
        if held_out:
            axes.plot(*zip(*held_out, strict=True), marker="o", markersize=3, label=f"{source}, held out")
    _mark_stages(axes, lines)
    axes.set(xlabel="tokens", ylabel="loss, nats per token", ylim=(0, None))
    axes.legend()


def _draw_load(axes: Any, lines: Sequence[dict[str, Any]]) -> None:
    for name in sorted({name for line in lines for name in line["loads"]}):
        points = [(line["total_tokens"], line["loads"][name]) for line in lines if name in line["loads"]]
        label = name.removeprefix("model.").removesuffix(".block_sparse_moe.gate")
        axes.plot(*zip(*points, strict=True), linewidth=0.6, label=label)
    _mark_stages(axes, lines)
    axes.set(xlabel="tokens", ylabel="largest over mean expert load", ylim=(1, None))
    axes.legend(fontsize="small")


def _mark_stages(axes: Any, lines: Sequence[dict[str, Any]]) -> None:
    for before, line in pairwise(lines):
        if line["stage"] != before["stage"]:
            axes.axvline(line["total_tokens"], linestyle=":", color="grey")
