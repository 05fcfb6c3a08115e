"""`baltoro cache-trace`: replay a request trace against the books of the memory, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from baltoro.bench.replay import Replayed
    from baltoro.model.config import K3Config


def cache_trace(
    file: Annotated[Path, typer.Argument(help="Requests as JSON lines; see below.")],
    make: Annotated[str | None, typer.Option(help="Write such a trace to FILE first: agent or mixed.")] = None,
    model: Annotated[str, typer.Option(help="config.json, model folder, or a name: k3, mini.")] = "k3",
    tp: Annotated[int, typer.Option(help="Ranks that share the heads: a state is smaller on each.", min=1)] = 8,
    memory: Annotated[str, typer.Option(help="Arena of one rank, as 20G or 16GiB.")] = "20G",
    pool: Annotated[str, typer.Option(help="unified or fixed.")] = "unified",
    slot_share: Annotated[float, typer.Option(help="Of a fixed pool: share of the bytes for state slots.")] = 0.5,
    policy: Annotated[str, typer.Option(help="Which state checkpoints are kept: EngineConfig.retention.")] = "turns",
    cache: Annotated[bool, typer.Option(help="Whether prefixes are kept at all.")] = True,
    page_size: Annotated[int, typer.Option(help="Tokens of a KV page.", min=1)] = 64,
    hash_endpoint: Annotated[int | None, typer.Option(help="Tokens between hash endpoints; none: as planned.")] = None,
    max_running: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 256,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step.", min=1)] = 8192,
    step_ms: Annotated[float, typer.Option(help="Time of a step, whatever is in it.", min=0.0)] = 20.0,
    token_us: Annotated[float, typer.Option(help="Time of each token on top.", min=0.0)] = 20.0,
    json: Annotated[Path | None, typer.Option(help="Default: FILE with .replay.json.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG or SVG; default: FILE with .png.")] = None,
    seed: Annotated[int, typer.Option(help="Of --make.")] = 0,
) -> None:
    """Replay a request trace against the real scheduler and memory; a runner computes nothing and keeps the time.

    A line of the trace is an object: `id`, `arrival` (seconds), `output` (tokens), and the prompt: either `prompt`
    (token ids), or `prefix` and `shared` (name of a common beginning, its length) or `after` (an earlier request whose
    prompt and output come first; `keep` only so many tokens of it), then `own` (tokens nobody else has). `label` is
    what results are counted by. Random ids stand in for what is not given.

    Examples:

        baltoro cache-trace /tmp/agent.jsonl --make agent

        baltoro cache-trace /tmp/agent.jsonl --policy second_hit --memory 12G

        baltoro cache-trace /tmp/mixed.jsonl --make mixed --pool fixed --slot-share 0.5 --model k3 --tp 8
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from baltoro.bench.books_runner import StepCost
    from baltoro.bench.replay import Replay
    from baltoro.bench.replay_plan import replay_config
    from baltoro.bench.replay_plot import plot_replay
    from baltoro.bench.replay_report import write_replay
    from baltoro.bench.trace import read_trace, write_trace
    from baltoro.bench.trace_make import make_trace
    from baltoro.cli.options import size_bytes

    if make is not None:
        write_trace(file, make_trace(make, seed))
    trace, shape = read_trace(file), _shape(model, tp)
    config = replay_config(
        shape,
        arena_bytes=size_bytes(memory, "--memory"),
        slot_share=slot_share,
        pool=_pool(pool),
        retention=policy,
        prefix_cache=cache,
        page_size=page_size,
        hash_endpoint="auto" if hash_endpoint is None else hash_endpoint,
        max_running=max_running,
        max_batch_tokens=batch_tokens,
        max_waiting=len(trace) + 1,
    )
    replay = Replay(trace, config, shape, cost=StepCost(step_ms / 1000, token_us / 1e6))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("requests", total=len(trace))
        found = replay.run(lambda: bar.update(task, advance=1))
    _show(found, Console())
    out, picture = json or file.with_suffix(".replay.json"), plot or file.with_suffix(".png")
    write_replay(out, found, {"trace": str(file), "model": model, "tp": tp, "step_ms": step_ms, "token_us": token_us})
    plot_replay(found, picture, f"{file.name}: {pool} pool of {memory}, {policy if cache else 'no prefix cache'}")
    print(f"wrote {out} and {picture}")


def _pool(name: str) -> Literal["unified", "fixed"]:
    """Errors: ConfigError."""
    from baltoro.errors import ConfigError

    pools: dict[str, Literal["unified", "fixed"]] = {"unified": "unified", "fixed": "fixed"}
    if name not in pools:
        raise ConfigError(f"--pool {name!r} must be unified or fixed")
    return pools[name]


def _shape(name: str, tp: int) -> K3Config:
    """The shape that decides the bytes of a slot and a page on one of `tp` ranks. Errors: ConfigError."""
    from baltoro.bench.shapes import named_shape, rank_shape
    from baltoro.model.config import K3Config

    shape = named_shape(name)
    return rank_shape(K3Config.load(name) if shape is None else shape, tp)


def _show(found: Replayed, console: Console) -> None:
    from rich.table import Table

    from baltoro.bench.replay_report import by_label
    from baltoro.cli.units import format_bytes

    totals, plan, held = found.totals(), found.plan, format_bytes(int(found.held_bytes))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = {
        "arena": format_bytes(plan.arena_bytes),
        "one state slot, one KV page": f"{format_bytes(plan.slot_bytes)}, {format_bytes(plan.page_bytes)}",
        "requests": f"{totals['requests']:,} ({totals['refused']} refused)",
        "never retracted": f"{totals['without_retraction']:,}",
        "retractions": f"{found.retractions:,}",
        "steps, seconds": f"{found.steps:,}, {found.time_s:,.1f}",
        "prompt tokens": f"{found.prompt_tokens:,}",
        "found in the cache": f"{found.hit_tokens:,} ({totals['hit_share']:.1%})",
        "computed": f"{found.computed_tokens:,} ({totals['computed_share']:.1%})",
        "held by the tree, mean and most": f"{held}, {format_bytes(found.peak_held_bytes)}",
        "states superseded, evicted": f"{found.superseded:,}, {found.evicted_states:,}",
        "blocks moved": f"{found.moves:,}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    labels = by_label(found)
    if len(labels) > 1:
        table = Table(title="by label")
        for column in ("label", "requests", "never retracted", "ended after, s"):
            table.add_column(column, justify="left" if column == "label" else "right")
        for label in labels:
            table.add_row(label.name or "-", *(f"{n:,}" for n in (label.requests, label.whole)), f"{label.last_s:,.1f}")
        console.print(table)
