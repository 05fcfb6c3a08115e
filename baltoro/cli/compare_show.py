"""A comparison for people, for programs and as a picture; and what is to be known about the build that made a dump."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baltoro.errors import ConfigError

if TYPE_CHECKING:
    from baltoro.model.dump_compare import Report, Row
    from baltoro.model.dump_layout import View

NUM_AROUND = 8  # rows before and after the first that is wrong
NUM_ROWS = 40  # more than that are shown in part
PAPER_WIDTH = 160  # of output that is no terminal's


def build_facts() -> dict[str, Any]:
    """Commit of the package where it lies in a repository, versions, machine, threads."""
    import torch

    home = Path(__file__).resolve().parent
    command = ["git", "-C", str(home), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or None
    except OSError:
        commit = None
    return {
        "commit": commit,
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def show(report: Report, a: View, b: View, *, is_whole: bool) -> None:
    """Table with the first divergence marked, then one line that says how it stands."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else PAPER_WIDTH)
    for note in _notes(a, b):
        console.print(f"[yellow]{escape(note)}[/yellow]", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for heading in ("rel. L2", "limit", "floor", "1 - cos", "max |A-B|"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    rows, num_hidden = _chosen(report, is_whole)
    for row in rows:
        style = "bold reverse red" if row is report.first else ("green" if row.is_good else "red")
        mark = "  <- first" if row is report.first else ""
        table.add_row(escape(row.name), *_cells(row), row.verdict + mark, style=style if not row.is_good else None)
    console.print(table)
    if num_hidden:
        console.print(f"{num_hidden:,} rows more; --all prints them")
    for complaint in report.complaints:
        console.print(f"[red]{escape(complaint)}[/red]", soft_wrap=True)
    if report.num_vacuous:
        advice = "their floor is too high to prove anything; dump both in float32, or give --rtol"
        console.print(f"[yellow]{report.num_vacuous:,} limits are 0.5 or more: {advice}[/yellow]", soft_wrap=True)
    num_wrong = sum(not row.is_good for row in report.rows)
    if report.is_good:
        worst = max((row for row in report.rows if row.relative_l2 is not None), key=lambda row: row.relative_l2 or 0.0)
        line = f"[green]The same[/green]: {report.num_compared:,} tensors; farthest apart {worst.relative_l2:.2e}"
        console.print(f"{line}, at {escape(worst.name)}", soft_wrap=True)
    elif report.first is not None:
        line = f"[red]Different[/red]: {num_wrong:,} of {len(report.rows):,} tensors, the first is"
        console.print(f"{line} {escape(report.first.name)} ({report.first.verdict})", soft_wrap=True)


def write_json(path: Path, report: Report, a: View, b: View) -> None:
    """Every row, whole or not at all. Numbers that JSON has no word for are strings."""
    from baltoro.model.tensor_file import write_text

    def plain(row: Row) -> dict[str, Any]:
        return {k: str(v) if v == float("inf") else v for k, v in asdict(row).items()}

    record = {
        "version": 1,
        "is_good": report.is_good,
        "first": None if report.first is None else report.first.name,
        "num_compared": report.num_compared,
        "num_vacuous": report.num_vacuous,
        "complaints": list(report.complaints),
        "a": [_described(dump.folder, dump.manifest) for dump in a.dumps],
        "b": [_described(dump.folder, dump.manifest) for dump in b.dumps],
        "tensors": [plain(row) for row in report.rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def draw(report: Report, path: Path) -> None:
    """Relative L2 over the order of the run, with floor and limit. Errors: ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib: pip install 'baltoro[train]'") from error
    rows = [(place, row) for place, row in enumerate(report.rows) if row.relative_l2 is not None]
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, style in (("relative_l2", "-"), ("floor", ":"), ("limit", "--")):
        points = [(place, value) for place, row in rows if (value := getattr(row, label))]
        if points:
            axes.plot(*zip(*points, strict=True), style, linewidth=0.9, label=label.replace("_l2", " L2"))
    places = [place for place, row in enumerate(report.rows) if row is report.first]
    for place in places:
        axes.axvline(place, color="red", linewidth=0.8)
        axes.annotate(report.rows[place].name, (place, 1), xycoords=("data", "axes fraction"), va="top", color="red")
    axes.set(xlabel="tensor, in the order of the run", ylabel="relative L2", yscale="log")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=110)


def _chosen(report: Report, is_whole: bool) -> tuple[list[Row], int]:
    """Rows to print, and how many are left out: those around the first that is wrong, else the farthest apart."""
    rows = list(report.rows)
    if is_whole or len(rows) <= NUM_ROWS:
        return rows, 0
    if report.first is not None:
        at = rows.index(report.first)
        chosen = rows[max(0, at - NUM_AROUND) : at + NUM_AROUND + 1]
    else:
        far = sorted(rows, key=lambda row: -(row.relative_l2 or 0.0))[: 2 * NUM_AROUND]
        chosen = [row for row in rows if row in far]
    return chosen, len(rows) - len(chosen)


def _cells(row: Row) -> list[str]:
    away = None if row.cosine is None else 1 - row.cosine
    numbers = (row.relative_l2, row.limit, row.floor, away, row.max_abs)
    return ["" if value is None else f"{value:.1e}" for value in numbers]


def _notes(a: View, b: View) -> list[str]:
    """What differs between the runs apart from their tensors."""
    mine, other = a.manifest, b.manifest
    words = {"config_digest": "configs", "is_training": "branches (trainer's or engine's)", "dtype": "dtypes"}
    found = [
        f"{word} differ: {getattr(mine, key)} and {getattr(other, key)}"
        for key, word in words.items()
        if getattr(mine, key) != getattr(other, key)
    ]
    if mine.floor_kind == "order" and (mine.dtype != other.dtype or mine.is_oracle != other.is_oracle):
        found.append("A's floor is that of the same kernels in one dtype: dump A with --measure-floor rounding")
    return found


def _described(folder: Path, manifest: Any) -> dict[str, Any]:
    names = ("dtype", "config_digest", "is_training", "is_oracle", "loss", "floor_kind", "facts")
    return {"folder": str(folder)} | {name: getattr(manifest, name) for name in names}
