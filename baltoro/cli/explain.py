"""`baltoro explain`: which implementation of each kernel runs on a device, and why."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:N or all; the device need not be in this machine.")
    ] = "cpu",
) -> None:
    """Show which kernel runs where, and why. BALTORO_REFERENCE=all (or names of operations) forces references.

    Examples:

        baltoro explain

        baltoro explain --device cuda

        baltoro explain --device all
    """
    import re

    import torch
    from rich.console import Console
    from rich.table import Table

    from baltoro.errors import ConfigError
    from baltoro.kernels.device import machine
    from baltoro.kernels.dispatch import choices

    if not re.fullmatch(r"all|cpu|cuda(:\d+)?", device):
        raise ConfigError(f"--device {device!r} is not known; use cpu, cuda, cuda:N or all")
    for name in ("cpu", "cuda") if device == "all" else (device,):
        where = torch.device(name)
        here = machine(where.type, where.index or 0)
        table = Table(title=f"{name}: {here.name}")
        for column in ("operation", "implementation", "reason", "module"):
            table.add_column(column, overflow="fold", no_wrap=column == "operation")
        for choice in choices(where):
            table.add_row(choice.op, choice.implementation, choice.reason, choice.module.removeprefix("baltoro."))
        Console().print(table)
