"""Runs of one recipe with several seeds, put together: curves with their mean, gains with an interval, cost and checks.

In: `metrics.jsonl` of each run, or what `--pack` made of them. Out: JSON, a picture (needs matplotlib), a table in
Markdown on stdout; with `--pack FILE.gz` all lines in one file, each with the name of its run.
Intervals: of one evaluation over its tasks, as the run wrote it; of a gain over seeds, from Student's t.

    python -m scripts.rl_report runs/rl-tiny-*/metrics.jsonl --json bench/results/rl-tiny.json --picture rl-tiny.png
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

Line = dict[str, Any]
Runs = dict[str, list[Line]]
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # two-sided, by number of values
KINDS = ("sampled", "greedy")


def read_runs(paths: Sequence[Path]) -> Runs:
    """Lines by run, in the order of their steps. The name: of the file's folder, or as it was packed."""
    runs: Runs = {}
    for path in paths:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        for line in map(json.loads, text.splitlines()):
            runs.setdefault(line.pop("run", path.parent.name or path.stem), []).append(line)
    if not runs or not all(runs.values()):
        raise SystemExit("no lines in these files: nothing would be reported")
    return {name: sorted(lines, key=lambda line: line["step"]) for name, lines in sorted(runs.items())}


def pack(runs: Runs, path: Path) -> None:
    """All lines in one compressed file."""
    with gzip.open(path, "wt") as file:
        for name, lines in runs.items():
            file.writelines(json.dumps({"run": name, **line}) + "\n" for line in lines)


def evals(lines: Sequence[Line]) -> list[tuple[int, Mapping[str, Any]]]:
    """(step, evaluation) of the lines that have one."""
    return [(line["step"], line["eval"]) for line in lines if "eval" in line]


def values(lines: Sequence[Line], *path: str) -> list[float]:
    """What lies under the keys of `path`, of the lines that have it."""
    found = []
    for line in lines:
        value: Any = line
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found.append(float(value))
    return found


def mean_and_half(numbers: Sequence[float]) -> tuple[float, float | None]:
    """Mean over seeds and the half-width of its 95 % interval; None for one seed."""
    if len(numbers) < 2:
        return fmean(numbers), None
    factor = T_95.get(len(numbers), 1.96)
    return fmean(numbers), factor * stdev(numbers) / math.sqrt(len(numbers))


def of_run(lines: Sequence[Line]) -> dict[str, Any]:
    """Figures of one run. seconds: of steps and evaluations, start-up not included."""
    known, steps = evals(lines), [line for line in lines if line["step"]]
    if len(known) < 2 or not steps:
        raise SystemExit("a run without a step and two evaluations has no gain to report")
    (_, first), (last_step, last) = known[0], known[-1]
    third = max(1, len(steps) // 3)
    found: dict[str, Any] = {"steps": last_step, "tasks": last["tasks"], "draws": last["draws"]}
    for kind in KINDS:
        found[kind] = {"first": first[kind], "last": last[kind], "gain": last[kind] - first[kind]}
    found["half_widths"] = [first["half_width"], last["half_width"]]
    found["curve"] = [{"step": step, **{kind: one[kind] for kind in KINDS}} for step, one in known]
    kl = values(steps, "k3") or [0.0]
    found["k3"] = {"max": max(kl), "first_third": median(kl[:third]), "last_third": median(kl[-third:])}
    found["max_dlogp"] = max(values(steps, "max_dlogp"), default=0.0)
    found["adapter_norm"] = values(steps, "adapter_norm")[-1]
    shares = [line["publish_s"] / line["step_s"] for line in steps if "publish_s" in line]
    found["sync"] = {
        "bytes": int(max(values(steps, "sync", "num_bytes"), default=0)),
        "ms": 1000 * median(values(steps, "publish_s") or [0.0]),
        "share": median(shares or [0.0]),
    }
    found["step_s"] = {
        key: median(values(steps, key) or [0.0]) for key in ("step_s", "rollout_s", "train_s", "publish_s")
    }
    found["seconds"] = sum(values(lines, "step_s")) + sum(values(lines, "eval_s"))
    found["rollout_tokens_a_second"] = sum(values(steps, "rollout_tokens")) / sum(values(steps, "rollout_s"))
    found["memory"] = next((line["memory"] for line in reversed(steps) if "memory" in line), None)
    found["aborted_by_an_update"] = sum(values(steps, "failed"))
    return found


def report(runs: Runs) -> dict[str, Any]:
    """Figures of all runs and their means."""
    found = {name: of_run(lines) for name, lines in runs.items()}
    whole: dict[str, Any] = {"runs": found, "num_runs": len(found)}
    for kind in KINDS:
        mean, half = mean_and_half([one[kind]["gain"] for one in found.values()])
        whole[kind] = {
            "first": fmean(one[kind]["first"] for one in found.values()),
            "last": fmean(one[kind]["last"] for one in found.values()),
            "gain": mean,
            "half_width": half,
        }
    return whole


def table(found: Mapping[str, Any]) -> str:
    """Markdown: a row a run, and the mean."""
    head = "| run | steps | sampled | greedy | k3, largest | norm of B | sync ms, share | minutes |\n|" + "---|" * 8
    rows = [head]
    for name, one in found["runs"].items():
        pairs = [f"{100 * one[kind]['first']:.1f} → {100 * one[kind]['last']:.1f} %" for kind in KINDS]
        sync = f"{one['sync']['ms']:.0f}, {100 * one['sync']['share']:.1f} %"
        cells = (name, one["steps"], *pairs, f"{one['k3']['max']:.1e}", f"{one['adapter_norm']:.2f}", sync)
        rows.append("| " + " | ".join(map(str, (*cells, f"{one['seconds'] / 60:.1f}"))) + " |")
    means = []
    for kind in KINDS:
        half = found[kind]["half_width"]
        means.append(f"{100 * found[kind]['gain']:+.1f}" + ("" if half is None else f" ± {100 * half:.1f}") + " points")
    rows.append(f"| mean | | {means[0]} | {means[1]} | | | | |")
    return "\n".join(rows)


def draw(runs: Runs, path: Path) -> None:
    """Held-out curves with their mean and interval, KL beside the adapter's norm, share of a step that is the sync,
    and the memory of the trainer that is not its own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    for axis, kind in zip(axes, KINDS, strict=False):
        _curves(axis, runs, kind)
        axis.set(title=f"held-out tasks right, {kind}", xlabel="step", ylabel="%", ylim=(0, 100))
    drift, cost = axes[2], axes[3]
    beside = drift.twinx()
    for name, lines in runs.items():
        steps = [line["step"] for line in lines if line.get("k3") is not None]
        drift.plot(steps, values(lines, "k3"), linewidth=0.7, label=f"k3, {name}")
        beside.plot(steps, values([line for line in lines if line["step"]], "adapter_norm")[: len(steps)], "--")
        shares = [(line["step"], 100 * line["publish_s"] / line["step_s"]) for line in lines if "publish_s" in line]
        cost.plot(*zip(*shares, strict=True), linewidth=0.7, label=f"sync, {name}")
        rest = [(line["step"], 100 * line["memory"]["rest_share"]) for line in lines if _has_rest(line)]
        if rest:
            cost.plot(*zip(*rest, strict=True), "s", label=f"trainer's rest, % of the base, {name}")
    drift.set(title="engine against trainer: k3 (lines), norm of B (dashes)", yscale="log", xlabel="step")
    cost.set(title="sync, % of a step; trainer's rest, % of the base", xlabel="step")
    for axis in axes:
        axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def _has_rest(line: Line) -> bool:
    return "rest_share" in line.get("memory", {})


def _curves(axis: Any, runs: Runs, kind: str) -> None:
    """Each run thin; the mean at steps that all of them have reached, with the interval over seeds."""
    import numpy as np

    curves = {name: [(step, 100 * one[kind]) for step, one in evals(lines)] for name, lines in runs.items()}
    for name, points in curves.items():
        axis.plot(*zip(*points, strict=True), linewidth=0.8, marker=".", label=name)
    last = min(points[-1][0] for points in curves.values())
    steps = sorted({step for points in curves.values() for step, _ in points if step <= last})
    every = [[float(np.interp(step, *zip(*points, strict=True))) for points in curves.values()] for step in steps]
    means = [mean_and_half(numbers) for numbers in every]
    axis.plot(steps, [mean for mean, _ in means], color="black", linewidth=2, label="mean")
    if len(curves) > 1:
        low, high = [m - (h or 0) for m, h in means], [m + (h or 0) for m, h in means]
        axis.fill_between(steps, low, high, color="black", alpha=0.12, label="95 % over seeds")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--pack", type=Path)
    given = parser.parse_args(arguments)
    runs = read_runs(given.files)
    if given.pack is not None:
        pack(runs, given.pack)
    found = report(runs)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.picture is not None:
        try:
            draw(runs, given.picture)
        except ModuleNotFoundError:
            print("no picture: matplotlib is not installed")
    print(table(found))


if __name__ == "__main__":
    main()
