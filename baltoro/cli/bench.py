"""`baltoro bench`: measurements. `baltoro bench eval` serves a model and asks it questions with known answers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baltoro.cli.bench_slice import measure_slice
from baltoro.errors import ConfigError

if TYPE_CHECKING:
    from baltoro.bench.memory import Growth

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", help="Measure.")


app.command("slice")(measure_slice)


@app.callback()
def _root() -> None:
    """Measure."""


@app.command("eval")
def evaluate(
    folder: Annotated[
        Path | None, typer.Argument(help="Model folder to serve for this run. Default: the one in models/.")
    ] = None,
    url: Annotated[str, typer.Option(help="Ask this server instead; its address without /v1.")] = "",
    questions: Annotated[Path, typer.Option(help="Questions, as JSON lines.")] = Path("bench/eval/tiny.jsonl"),
    families: Annotated[str, typer.Option(help="Names, with commas between them; none: all.")] = "",
    limit: Annotated[int | None, typer.Option(help="At most so many questions of each family.", min=1)] = None,
    model: Annotated[str | None, typer.Option(help="Name to ask for; none: the first that the server lists.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.", min=1)] = 8,
    json: Annotated[Path | None, typer.Option(help="Write the whole run to this file.")] = None,
) -> None:
    """Ask a served model questions with known answers; count by family, with 95 % intervals.

    Without --url the model is served for the time of the run.

    Examples:

        baltoro bench eval

        baltoro bench eval models/tiny --families tools --json run.json

        baltoro bench eval --url http://127.0.0.1:8000 --families add_sub,tools --limit 20 --json run.json
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from baltoro.bench.evaluate import as_json, ask_all, first_model, report
    from baltoro.bench.processes import our_server
    from baltoro.bench.questions import read_questions, select
    from baltoro.cli.box import find_model

    if url and folder is not None:
        raise ConfigError(f"--url asks a server that runs, {folder} would start one: give one of them")
    wanted = [name.strip() for name in families.split(",") if name.strip()]
    asked = select(read_questions(questions), wanted, limit)
    with ExitStack() as stack, Progress(transient=True) as bar:
        task = bar.add_task("questions", total=len(asked))
        url = url or stack.enter_context(our_server(find_model(folder))).url
        name = model or first_model(url)
        verdicts = ask_all(
            asked, url, model=name, concurrency=concurrency, on_verdict=lambda _: bar.update(task, advance=1)
        )
    rows = report(verdicts)
    table = Table(title=f"{name} at {url}, greedy")
    for column in ("family", "right", "asked", "share", "95 % interval", "thought", "said"):
        table.add_column(column, justify="left" if column == "family" else "right")
    for row in rows:
        interval = f"{row.low:.1%} to {row.high:.1%}"
        counts = (str(row.right), str(row.asked), f"{row.share:.1%}", interval)
        table.add_row(row.family, *counts, f"{row.reasoning_tokens:.0f}", f"{row.completion_tokens:.0f}")
    Console().print(table)
    if failed := [v for v in verdicts if v.error]:
        print(f"{len(failed)} questions got no answer; the first: {failed[0].id}: {failed[0].error}")
    if json is not None:
        settings = {"url": url, "model": name, "questions": str(questions), "families": wanted, "limit": limit}
        json.write_text(as_json(rows, verdicts, settings), encoding="utf-8")


@app.command()
def engine(
    model: Annotated[Path | None, typer.Argument(help="Model folder. Default: the one in models/.")] = None,
    peer: Annotated[bool, typer.Option(help="Also against transformers, on random Kimi-Linear weights.")] = False,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    json: Annotated[Path, typer.Option(help="File to write.")] = Path("bench/results/engine.json"),
) -> None:
    """First token, one stream, sixteen streams, in this process; optionally beside transformers.

    Example:

        baltoro bench engine --peer
    """
    import tempfile

    import torch

    from baltoro.bench.engine import against_transformers, engine_rounds, engine_summary, kimi_linear_shape
    from baltoro.bench.record import write_record
    from baltoro.cli.box import find_model
    from baltoro.llm import LLM

    folder = find_model(model)
    results = {"engine": engine_summary(engine_rounds(LLM(folder), rounds=rounds))}
    _print_medians(f"{folder.name}, in process", results["engine"]["medians"])
    if peer:
        from shutil import copyfile

        from baltoro.model.build import new_model
        from baltoro.model.config import K3Config
        from baltoro.model.weights import save_model

        with tempfile.TemporaryDirectory() as scratch:
            shape = kimi_linear_shape(K3Config.load(folder).vocab_size)
            save_model(new_model(shape, std=0.05), scratch)
            for name in ("tiktoken.model", "tokenizer_config.json"):
                copyfile(folder / name, Path(scratch) / name)
            results["transformers"] = against_transformers(Path(scratch), rounds=min(rounds, 3))
        for case, found in results["transformers"].items():
            _print_medians(f"{case} lengths, tokens/s", found["medians"] | {"ratio": found["ratio"]})
    settings = {"model": str(folder), "rounds": rounds, "threads": torch.get_num_threads()}
    write_record(json, "engine", settings, results)
    print(f"wrote {json}")


@app.command()
def serve(
    model: Annotated[Path | None, typer.Argument(help="Model folder. Default: the one in models/.")] = None,
    peer: Annotated[bool, typer.Option(help="Also mlx-lm's server on the same folder (extra `peers`).")] = False,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    json: Annotated[Path, typer.Option(help="File to write.")] = Path("bench/results/serve.json"),
) -> None:
    """Start, memory, first token, one stream, sixteen streams, over HTTP; optionally beside mlx-lm's server on the same
    files.

    Example:

        baltoro bench serve --peer
    """
    from dataclasses import asdict

    from rich.progress import Progress

    from baltoro.bench.memory import first_answer_growth
    from baltoro.bench.processes import mlx_server, our_server
    from baltoro.bench.record import write_record
    from baltoro.bench.serve import Load, measure, summary
    from baltoro.cli.box import find_model

    folder, load = find_model(model), Load(rounds=rounds)
    with ExitStack() as stack, Progress(transient=True) as bar:
        servers = [stack.enter_context(our_server(folder))]
        growth = first_answer_growth(servers[0], folder)
        if peer:
            servers.append(stack.enter_context(mlx_server(folder)))
        task = bar.add_task("rounds", total=(rounds + 1) * len(servers))
        results = summary(measure(servers, load, lambda: bar.update(task, advance=1)))
        results["servers"] = {
            s.name: {"start_s": s.start_s, "start_cpu_s": s.start_cpu_s, "resident_bytes": s.resident_bytes()}
            for s in servers
        }
        results["memory"] = {**asdict(growth), "grown_bytes": growth.grown_bytes, "ratio": growth.ratio}
    _print_start(results["servers"]["baltoro"], growth)
    for name, medians in results["medians"].items():
        _print_medians(name, medians)
    for name, ratios in results["ratios"].items():
        _print_medians(f"baltoro over {name}", ratios)
    write_record(json, "serve", {"model": str(folder), **asdict(load)}, results)
    print(f"wrote {json}")


@app.command()
def cache(
    model: Annotated[Path | None, typer.Argument(help="Model folder for plain against overlapped.")] = None,
    books: Annotated[bool, typer.Option("--books", help="Only what needs no model.")] = False,
    rounds: Annotated[int, typer.Option(help="Pairs of plain and overlapped with the model.", min=1)] = 5,
    json: Annotated[Path, typer.Option(help="File to write.")] = Path("bench/results/cache.json"),
) -> None:
    """The memory: what plan and commit cost, what overlap hides, what one pool and each retention policy bring.

    Example:

        baltoro bench cache
    """
    from rich.progress import Progress

    from baltoro.bench.cache import BOOKS
    from baltoro.bench.cache_traces import TRACES
    from baltoro.bench.engine import overlap_pairs
    from baltoro.bench.record import write_record
    from baltoro.cli.box import find_model

    folder = None if books else find_model(model)
    results: dict[str, Any] = {}
    with Progress(transient=True) as bar:
        task = bar.add_task("starting", total=len(BOOKS) + len(TRACES) + (folder is not None))
        for name, measure in (BOOKS | TRACES).items():
            bar.update(task, description=name)
            results[name] = measure()
            bar.update(task, advance=1)
        if folder is not None:
            bar.update(task, description=f"overlap on {folder}")
            results["model"] = overlap_pairs(folder, rounds=rounds)
    _print_cache(results)
    write_record(json, "cache", {"model": None if folder is None else str(folder), "rounds": rounds}, results)
    print(f"wrote {json}")


@app.command()
def kernels(
    peers: Annotated[bool, typer.Option("--peers", help="Also the peers that are installed.")] = False,
    only: Annotated[
        str, typer.Option(help="Of kda, mla, mla_prefill, attnres, moe, with commas between them; none: all.")
    ] = "",
    json: Annotated[Path, typer.Option(help="File to write.")] = Path("bench/results/kernels.json"),
) -> None:
    """Times of kernels on a CUDA device, against floors of the same run; each is checked before it is timed.

    Example:

        baltoro bench kernels --peers --only moe
    """
    from dataclasses import asdict

    import torch

    from baltoro.bench.kernels import measure
    from baltoro.bench.record import write_record

    wanted = [name.strip() for name in only.split(",") if name.strip()]
    ceilings, figures = measure(wanted, with_peers=peers)
    print(f"copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, bf16 product {ceilings.flops_per_s / 1e12:.0f} TFLOP/s")
    rows = []
    for figure in figures:
        shares = "".join(f", {peer} {time:.1f} us" for peer, time in figure.peers.items())
        error = "" if figure.error is None else f", error {figure.error:.1e}"
        print(f"{figure.name}: {figure.time_us:.1f} us, {figure.over_floor:.2f} x floor{error}{shares}")
        rows.append(asdict(figure))
    settings = {"only": wanted, "peers": peers, "device": torch.cuda.get_device_name()}
    write_record(json, "kernels", settings, {"ceilings": asdict(ceilings), "figures": rows})
    print(f"wrote {json}")


def _print_cache(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from baltoro.cli.units import format_bytes

    _print_medians("a step of decodes", results["planning"]["medians"])
    _print_medians("a prompt of 100,000 tokens", results["matching"]["medians"])
    shown = results["overlap"]["exposed_ms"] | {"hidden share": results["overlap"]["hidden_share"]}
    _print_medians("step beyond the device's time, ms", shown)
    _print_medians("unified over fixed", results["mixed"]["ratios"])
    for arena, found in results["agent"].items():
        table = Table(title=f"agent trace, {arena} arena of {format_bytes(found['arena_bytes'])}")
        for column in ("policy", "hit share", "computed", "of no cache", "held, mean"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for policy, row in found["policies"].items():
            shares = (f"{row['hit_share']:.1%}", f"{row['computed_tokens']:,}", f"{row['computed_over_none']:.1%}")
            table.add_row(policy, *shares, format_bytes(int(row["held_bytes"])))
        Console().print(table)
    print(f"shared beginning, tokens found: {results['arrivals']}")
    if "model" in results:
        _print_medians("overlapped over plain, tokens/s", results["model"]["ratios"])


def _print_start(server: dict[str, float], growth: Growth) -> None:
    weights, pool, grown = (n / 2**20 for n in (growth.weight_bytes, growth.pool_bytes, growth.grown_bytes))
    print(f"start {server['start_s']:.1f} s, of which {server['start_cpu_s']:.1f} s of computing")
    print(
        f"up to its first answer the engine grew by {grown:.0f} MiB: {growth.ratio:.2f} of its weights "
        f"({weights:.0f} MiB) and pool ({pool:.0f} MiB)"
    )


def _print_medians(title: str, figures: dict[str, float]) -> None:
    print(title + ": " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
