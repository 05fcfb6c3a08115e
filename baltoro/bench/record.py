"""One JSON file per measurement: what was run, where, on what, and every number.

In: a name, settings, samples. Out: `bench/results/NAME.json`, written atomically.
Invariants: a figure that is quoted has a file; samples are kept whole, medians are derived.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "mlx", "mlx-lm", "triton", "flash-linear-attention")


def median(samples: Sequence[float]) -> float:
    """0 for none."""
    return statistics.median(samples) if samples else 0.0


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def environment_facts() -> dict[str, Any]:
    """Commit, device, versions."""
    return {
        "commit": _git("rev-parse", "--short", "HEAD"),
        "is_clean": not _git("status", "--porcelain", "--untracked-files=no"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions(),
    }


def write_record(path: Path, name: str, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Write the file. `results` holds samples and what was derived from them."""
    record = {"name": name, **environment_facts(), "settings": dict(settings), "results": dict(results)}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(path)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
