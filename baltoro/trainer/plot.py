"""Pictures of a run: loss, and expert load, from its `metrics.jsonl`.

In: the run's folder. Out: `loss.png` and `load.png` in it. Needs matplotlib (extra `train`), imported only here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    loss = Figure(figsize=(10, 5.5), layout="constrained")
    _draw_loss(loss.add_subplot(), lines)
    load = Figure(figsize=(8, 4.5), layout="constrained")
    _draw_load(load.add_subplot(), lines)
    paths = [out / "loss.png", out / "load.png"]
    for figure, path in zip((loss, load), paths, strict=True):
        figure.savefig(path, dpi=110)
    return paths


def _draw_loss(axes: Any, lines: Sequence[dict[str, Any]]) -> None:
    """A colour a corpus: the line is training (running mean), the dots are held out. Logarithmic: what is learnt by
    heart and prose differ by a factor of a thousand."""
    for number, source in enumerate(sorted({name for line in lines for name in line["sources"]})):
        color = f"C{number % 10}"
        style = "-" if number < 10 else "--"
        points = [(line["total_tokens"], line["sources"][source]) for line in lines if source in line["sources"]]
        tokens, losses = zip(*points, strict=True)
        axes.plot(tokens, _smooth(losses), style, linewidth=1.0, color=color, label=source)
        held_out = [(line["total_tokens"], line["held_out"][source]) for line in lines if "held_out" in line]
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o", markersize=3.5, color=color)
    _mark_stages(axes, lines)
    axes.set(xlabel="tokens", ylabel="loss, nats per token (dots: held out)", yscale="log")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _smooth(values: Sequence[float]) -> list[float]:
    """Running mean over a hundredth of the run."""
    kept, factor = values[0], 1.0 / max(1.0, len(values) / 100)
    return [kept := kept + factor * (value - kept) for value in values]


def _draw_load(axes: Any, lines: Sequence[dict[str, Any]]) -> None:
    for name in sorted({name for line in lines for name in line["loads"]}):
        points = [(line["total_tokens"], line["loads"][name]) for line in lines if name in line["loads"]]
        label = name.removeprefix("model.").removesuffix(".block_sparse_moe.gate")
        axes.plot(*zip(*points, strict=True), linewidth=0.6, label=label)
    _mark_stages(axes, lines)
    axes.set(xlabel="tokens", ylabel="largest over mean expert load", ylim=(1, None))
    axes.legend(fontsize="small")


def sampling_floor(tokens: int, num_active: int, num_experts: int, *, draws: int = 200, seed: int = 0) -> float:
    """Mean of the largest over the mean load if every token picked `num_active` of `num_experts` experts by chance
    alone, all alike: balance that is perfect in expectation does not look better than this."""
    import numpy as np

    mean = tokens * num_active / num_experts
    # a token's picks differ, so the loads of a step have a fixed sum: normal with the hypergeometric's variance
    spread = (mean * (1 - num_active / num_experts)) ** 0.5
    noise = np.random.default_rng(seed).standard_normal((draws, num_experts))
    noise = (noise - noise.mean(1, keepdims=True)) * (num_experts / (num_experts - 1)) ** 0.5
    return float(1 + (noise.max(1) * spread / mean).mean())


def plot_balance(runs: Mapping[str, Sequence[tuple[int, float]]], floor: float, path: Path) -> None:
    """One picture of several runs' (step, mean over layers of the largest over the mean expert load), and the floor."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, points in runs.items():
        axes.plot(*zip(*points, strict=True), linewidth=1.2, label=label)
    axes.axhline(floor, linestyle=":", color="black", label=f"sampling floor {floor:.3f}")
    axes.set(xlabel="step", ylabel="largest over mean expert load, mean of layers", ylim=(1, None))
    axes.legend()
    figure.savefig(path, dpi=110)


def _mark_stages(axes: Any, lines: Sequence[dict[str, Any]]) -> None:
    for before, line in pairwise(lines):
        if line["stage"] != before["stage"]:
            axes.axvline(line["total_tokens"], linestyle=":", color="grey")
