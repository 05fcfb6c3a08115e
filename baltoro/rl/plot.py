"""Pictures of an RL run from its `metrics.jsonl`: one page of small plots. Needs matplotlib (extra `train`).

In: the run's folder. Out: `rl.png` in it: reward, eval pass rate with intervals, KL and |dlogp|, adapter norm, lengths,
staleness, reason codes, clip share, groups without signal, canary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baltoro.errors import ConfigError
from baltoro.rl.log import read_log

Line = dict[str, Any]


def plot_run(out: Path) -> Path:
    """Draw; returns the picture's path. Errors: ConfigError if matplotlib is missing, or there is nothing to draw."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib: pip install 'baltoro[train]'") from error
    lines = read_log(out)
    figure = Figure(figsize=(15, 10), layout="constrained")
    axes = figure.subplots(3, 3).flatten()
    drawings: Sequence[Callable[[Any, Sequence[Line]], None]] = (
        _rewards, _evals, _drift, _norm, _lengths, _staleness, _reasons, _clip, _canary,
    )  # fmt: skip
    for one, draw in zip(axes, drawings, strict=True):
        draw(one, lines)
        one.set_xlabel("step")
        if one.get_legend_handles_labels()[1]:
            one.legend(fontsize="small")
    figure.savefig(out / "rl.png", dpi=90)
    return out / "rl.png"


def series(lines: Sequence[Line], *path: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the lines that have a value under the keys of `path`."""
    steps, values = [], []
    for line in lines:
        value: Any = line
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            steps.append(line["step"])
            values.append(float(value))
    return steps, values


def _rewards(axes: Any, lines: Sequence[Line]) -> None:
    axes.plot(*series(lines, "score"), label="score", linewidth=0.8)
    axes.plot(*series(lines, "reward"), label="reward after shaping", linewidth=0.8)
    axes.plot(*series(lines, "zero_std"), label="groups of equal rewards", linewidth=0.8)
    axes.set_title("reward of the rollouts")


def _evals(axes: Any, lines: Sequence[Line]) -> None:
    steps, values = series(lines, "eval", "sampled")
    axes.errorbar(steps, values, yerr=series(lines, "eval", "half_width")[1], marker="o", label="sampled, 95 %")
    axes.plot(*series(lines, "eval", "greedy"), marker="s", label="greedy")
    axes.set(title="held-out pass rate", ylim=(0, 1))


def _drift(axes: Any, lines: Sequence[Line]) -> None:
    for key, label in (("k3", "k3 KL"), ("mean_dlogp", "mean |dlogp|"), ("max_dlogp", "max |dlogp|")):
        axes.plot(*series(lines, key), label=label, linewidth=0.8)
    axes.set(title="engine against trainer", yscale="log")


def _norm(axes: Any, lines: Sequence[Line]) -> None:
    axes.plot(*series(lines, "adapter_norm"), label="norm of B", linewidth=0.8)
    axes.plot(*series(lines, "grad_norm"), label="gradient norm", linewidth=0.8)
    axes.set_title("adapter")


def _lengths(axes: Any, lines: Sequence[Line]) -> None:
    axes.plot(*series(lines, "length_mean"), label="mean", linewidth=0.8)
    axes.plot(*series(lines, "length_max"), label="max", linewidth=0.8)
    axes.set_title("sampled tokens")


def _staleness(axes: Any, lines: Sequence[Line]) -> None:
    for key in ("staleness_mean", "staleness_max", "versions_max"):
        axes.plot(*series(lines, key), label=key.replace("_", " "), linewidth=0.8)
    axes.set_title("staleness, versions in a trajectory")


def _reasons(axes: Any, lines: Sequence[Line]) -> None:
    names = sorted({name for line in lines for name in line.get("reasons", {})})
    steps = [line["step"] for line in lines if "reasons" in line]
    shares = [
        [line["reasons"].get(name, 0) / max(1, sum(line["reasons"].values())) for line in lines if "reasons" in line]
        for name in names
    ]
    if names:
        axes.stackplot(steps, *shares, labels=names)
    axes.set_title("reason codes")


def _clip(axes: Any, lines: Sequence[Line]) -> None:
    for key in ("clip_low", "clip_high", "tis_cut"):
        axes.plot(*series(lines, key), label=key.replace("_", " "), linewidth=0.8)
    axes.set_title("share of tokens clipped")


def _canary(axes: Any, lines: Sequence[Line]) -> None:
    for key in ("engine", "trainer", "base"):
        axes.plot(*series(lines, "canary", key), label=key, linewidth=0.8)
    axes.set_title("canary, mean logprob")
