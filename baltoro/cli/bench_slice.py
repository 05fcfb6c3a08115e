"""`baltoro bench slice`: one rank's decode step of K3, from references to captured kernels, against its roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def measure_slice(
    batches: Annotated[str, typer.Option(help="Requests of a step, with commas between them.")] = "1,64",
    keys: Annotated[int, typer.Option(help="Context of each request.", min=1)] = 4096,
    shows_kernels: Annotated[bool, typer.Option("--kernels", help="Also the last step kernel by kernel.")] = False,
    json: Annotated[Path, typer.Option(help="File to write.")] = Path("bench/results/slice.json"),
) -> None:
    """A decode step of one rank of eight at K3's widths: KDA, latent attention and experts, rung by rung.

    Example:

        baltoro bench slice --kernels
    """
    from dataclasses import asdict

    import torch

    from baltoro.bench.kernels.timeline import describe, timeline
    from baltoro.bench.kernels.timing import ceilings, wall_or_graph_us
    from baltoro.bench.record import write_record
    from baltoro.bench.slice import LADDER, Slice, climb, published_shape
    from baltoro.errors import ConfigError

    if not torch.cuda.is_available():
        raise ConfigError("the slice is timed on a CUDA device; there is none here")
    torch.set_grad_enabled(False)
    found, results = ceilings(), []
    for batch in (int(text) for text in batches.split(",")):
        one, first, steps = Slice(published_shape(keys), batch, dtype=torch.bfloat16, device="cuda"), None, []
        for rung in LADDER:
            step, out = climb(one, rung, found.bytes_per_s, wall_or_graph_us, first)
            first = out if first is None else first
            steps.append(asdict(step))
            print(f"batch {batch}, {step.name}: {step.time_us:.1f} us, {step.share:.1%} of the roofline")
        if shows_kernels:
            print(describe(timeline(one)))
        results.append({"batch": batch, "bytes": one.bytes_by_part(), "steps": steps})
    settings = {"batches": batches, "keys": keys, "device": torch.cuda.get_device_name()}
    write_record(json, "slice", settings, {"ceilings": asdict(found), "slices": results})
    print(f"wrote {json}")
