"""`baltoro sizes`: the arithmetic of model/sizes.py for a model folder or a config.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from baltoro.model.sizes import Fit, Sizes


def sizes(
    model: Annotated[Path, typer.Argument(help="Model folder or config.json.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks that share the heads and the experts.", min=1)] = 1,
    memory: Annotated[
        str | None, typer.Option(help="Memory of one rank, as 80G or 141GiB: how many requests and tokens fit.")
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Parameters, bytes per token and per request, weights per rank, and what fits.

    Examples: `baltoro sizes models/mini`, `baltoro sizes config.json --tp 8 --memory 141GiB`
    """
    import json
    from dataclasses import asdict

    from baltoro.cli.units import parse_bytes
    from baltoro.model.config import K3Config
    from baltoro.model.sizes import fit, measure
    from baltoro.model.weight_files import WeightFiles, has_weights

    config = K3Config.load(model)
    if model.is_dir() and has_weights(model):  # the files decide whether experts are packed
        config = config.with_(are_experts_packed=WeightFiles.open(model).is_packed)
    sizes = measure(config, tp=tp)
    room = None if memory is None else fit(sizes, parse_bytes(memory))
    if is_json:
        found = asdict(sizes) | {"state_bytes_per_request": sizes.state_bytes_per_request}
        if room is not None:
            found["fit"] = asdict(room) | {"max_requests": dict(room.max_requests)}
        typer.echo(json.dumps(found, indent=2))
        return
    _show(sizes, room)


def _show(sizes: Sizes, room: Fit | None) -> None:
    """Tables for people."""
    from rich.console import Console
    from rich.table import Table

    from baltoro.cli.units import format_bytes, format_count

    rank = "per rank" if sizes.tp > 1 else "in memory"
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    counts = {
        "text parameters": sizes.text_parameters,
        "active per token": sizes.active_parameters,
        "active without embedding table": sizes.active_parameters_without_embedding,
        "vision and projector": sizes.vision_parameters,
        "MTP layers": sizes.mtp_parameters,
        "tensors": sizes.num_tensors,
        "FLOPs per token": sizes.flops_per_token,
        "  and per token of context": sizes.flops_per_context_token,
    }
    volumes = {
        "files": sizes.file_bytes,
        f"weights {rank}": sizes.weight_bytes_per_rank,
        "KV per token": sizes.kv_bytes_per_token,
        "recurrent state per request": sizes.recurrent_bytes_per_request,
        "convolution history per request": sizes.conv_bytes_per_request,
    }
    for name, count in counts.items():
        table.add_row(name, f"{count:,}", format_count(count))
    for name, volume in volumes.items():
        table.add_row(name, f"{volume:,}", format_bytes(volume))
    if room is not None:
        table.add_row("memory", f"{room.memory_bytes:,}", format_bytes(room.memory_bytes))
        table.add_row("free beside the weights", f"{room.free_bytes:,}", format_bytes(room.free_bytes))
        if room.free_bytes >= 0:
            tokens = "any number" if room.max_tokens is None else f"{room.max_tokens:,}"
            table.add_row("tokens of a single request", tokens, "")
            for length, requests in room.max_requests:
                table.add_row(f"requests of {length:,} tokens", f"{requests:,}", "")
    console = Console()
    console.print(table)
    if room is not None and room.free_bytes < 0:
        console.print(f"The weights do not fit: {format_bytes(-room.free_bytes)} are missing. Raise --tp.")
