"""`baltoro explain`: which implementation of each kernel runs on a device, and why."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; the device need not be in this machine.")] = "cpu",
) -> None:
    """Show which kernel runs where, and why.

    Examples:

        baltoro explain

        baltoro explain --device cuda
    """
    import re

    import torch
    from rich.console import Console
    from rich.table import Table

    from baltoro.errors import ConfigError
    from baltoro.kernels.device import machine
    from baltoro.kernels.dispatch import choices

    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"--device {device!r} is not known; use cpu, cuda or cuda:N")
    where = torch.device(device)
    here = machine(where.type, where.index or 0)
    table = Table(title=f"{device}: {here.name}")
    for column in ("operation", "implementation", "reason"):
        table.add_column(column, overflow="fold")
    for choice in choices(where):
        table.add_row(choice.op, choice.implementation, choice.reason)
    Console().print(table)
