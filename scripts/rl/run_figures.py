"""Figures of a finished run, from its `metrics.jsonl`: what improved, what stayed flat, what a publication costs.

    python -m scripts.rl.run_figures runs/rl-tiny-cpu --picture docs/pictures/rl-tiny-cpu.png

Written to bench/results/rl-cpu.json, section run.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from baltoro.rl.log import read_log
from baltoro.rl.plot import plot_run
from scripts.rl.result import record, rounded

Line = dict[str, Any]


def figures(lines: Sequence[Line]) -> dict[str, Any]:
    """Of all lines. sync_share: median share of a step without its evaluation."""
    steps, evals = [line for line in lines if line["step"]], [line for line in lines if "eval" in line]
    fifth = max(1, len(steps) // 5)
    k3 = [line["k3"] for line in steps if line.get("k3") is not None]
    working = [line["rollout_s"] + line["train_s"] for line in steps if "sync" in line]
    syncs = [line["sync"]["seconds"] for line in steps if "sync" in line]
    keys = ("sampled", "half_width", "greedy")
    return {
        "steps": steps[-1]["step"],
        "evals": [{"step": line["step"], **{key: line["eval"][key] for key in keys}} for line in evals],
        "sampled_gain": evals[-1]["eval"]["sampled"] - evals[0]["eval"]["sampled"],
        "greedy_gain": evals[-1]["eval"]["greedy"] - evals[0]["eval"]["greedy"],
        "k3_first_fifth": fmean(k3[:fifth]),
        "k3_last_fifth": fmean(k3[-fifth:]),
        "k3_max": max(k3),
        "max_dlogp": max(line["max_dlogp"] for line in steps if line.get("max_dlogp") is not None),
        "adapter_norm": [line["adapter_norm"] for line in steps[:: max(1, len(steps) // 10)]],
        "reward": [line["reward"] for line in steps],
        "canary_ratio_last": steps[-1]["canary"]["ratio"],
        "sync_bytes": max(line["sync"]["num_bytes"] for line in steps if "sync" in line),
        "sync_ms": 1000 * median(syncs),
        "sync_share": median(s / (s + w) for s, w in zip(syncs, working, strict=True)),
        "failed": sum(line["failed"] for line in steps),
        "step_s": median(line["rollout_s"] + line["train_s"] for line in steps),
    }


def main() -> None:
    """Read, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    found = rounded(figures(read_log(options.run)))
    print(found)
    record("run", {"recipe": options.run.name} | found)
    if options.picture is not None:
        shutil.copy(plot_run(options.run), options.picture)


if __name__ == "__main__":
    main()
