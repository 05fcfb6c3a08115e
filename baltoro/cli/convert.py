"""`baltoro convert`: a checkpoint rewritten with other files, packed or unpacked experts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Packed(StrEnum):
    """Packed forms that can be written."""

    mxfp4 = "mxfp4"


class Dense(StrEnum):
    """Dtypes that hold every packed value exactly."""

    bf16 = "bf16"
    fp32 = "fp32"


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Model folder to read.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; must not exist or be empty.")],
    quantise: Annotated[Packed | None, typer.Option(help="Pack the routed experts.")] = None,
    dequantise: Annotated[Dense | None, typer.Option(help="Unpack the routed experts, exactly.")] = None,
    max_shard_bytes: Annotated[str, typer.Option(help="Size of a file, as 5G or 512MiB.")] = "5G",
) -> None:
    """Rewrite a checkpoint, one tensor in memory at a time. What need not change is copied byte for byte.

    Examples: `baltoro convert big small --quantise mxfp4`, `baltoro convert a b --max-shard-bytes 1G`
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from baltoro.cli.units import parse_bytes
    from baltoro.model import convert as rewrite

    bar = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*bar, console=Console(stderr=True)) as progress:
        task = progress.add_task(target.name, total=None)
        rewrite.convert(
            source,
            target,
            quantise=quantise is not None,
            dequantise=None if dequantise is None else dequantise.value,
            max_shard_bytes=parse_bytes(max_shard_bytes),
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    typer.echo(f"wrote {target}")
