"""`baltoro inspect`: is every tensor of a checkpoint the one that its config asks for?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from baltoro.model.inspect import Report

GROUP_NAMES = {
    "globals": "embedding, head, last norm and mix",
    "layer": "every layer: norms, mixes, gate, output",
    "kda": "KDA",
    "mla": "MLA",
    "dense": "dense MLP",
    "moe": "router, latent, shared experts",
    "experts": "routed experts",
    "mtp": "MTP layers",
    "vision": "vision tower",
    "projector": "projector",
}
NUM_SHOWN = 20


def inspect(
    source: Annotated[Path, typer.Argument(help="Model folder, or an index: .json or .json.gz.")],
    config: Annotated[Path | None, typer.Option(help="config.json; default: the one beside the weights.")] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with every problem.")] = False,
) -> None:
    """Check every name, shape, dtype and byte of a checkpoint against its config, without reading weights.

    Headers are compared where the files are at hand; an index alone will do. Ends with 1 if anything is wrong.

    Examples: `baltoro inspect models/mini`, `baltoro inspect model.safetensors.index.json.gz --config config.json`
    """
    import json
    from dataclasses import asdict

    from baltoro.model.inspect import inspect_checkpoint

    report = inspect_checkpoint(source, config)
    if is_json:
        typer.echo(json.dumps({"is_good": report.is_good} | asdict(report), indent=2))
    else:
        _show(report)
    if not report.is_good:
        raise typer.Exit(1)


def _show(report: Report) -> None:
    """A table by group, then the problems."""
    from collections import Counter

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(box=None, pad_edge=False)
    for heading in ("group", "tensors", "bytes"):
        table.add_column(heading, justify="left" if heading == "group" else "right")
    for group, tally in report.groups.items():
        table.add_row(GROUP_NAMES[group], f"{tally.num_tensors:,}", f"{tally.num_bytes:,}")
    table.add_section()
    table.add_row("total", f"{report.total.num_tensors:,}", f"{report.total.num_bytes:,}", style="bold")
    if report.index_bytes is not None:
        table.add_row("by the index", "", f"{report.index_bytes:,}")
    console.print(table)
    experts = "MXFP4" if report.is_packed else "unquantised"
    console.print(f"{report.num_compared} of {report.num_files} files compared; routed experts {experts}")
    if report.is_good:
        console.print("[green]Every name is claimed once; nothing is missing.[/green]")
        return
    kinds = Counter(problem.kind for problem in report.problems)
    listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    console.print(f"[red]Problems: {len(report.problems):,}[/red] ({listed})")
    for problem in report.problems[:NUM_SHOWN]:
        console.print(f"  {problem.kind}: {escape(problem.name)}: {escape(problem.message)}", soft_wrap=True)
    if len(report.problems) > NUM_SHOWN:
        console.print(f"  ... and {len(report.problems) - NUM_SHOWN:,} more; --json lists them all")
