"""`baltoro bench`: measurements. `baltoro bench eval` asks a served model questions with known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", help="Measure.")


@app.callback()
def _root() -> None:
    """Measure."""


@app.command("eval")
def evaluate(
    url: Annotated[str, typer.Option(help="Address of the server, without /v1.")] = "http://127.0.0.1:8000",
    questions: Annotated[Path, typer.Option(help="Questions, as JSON lines.")] = Path("bench/eval/tiny.jsonl"),
    families: Annotated[str, typer.Option(help="Names, with commas between them; none: all.")] = "",
    limit: Annotated[int | None, typer.Option(help="At most so many questions of each family.", min=1)] = None,
    model: Annotated[str | None, typer.Option(help="Name to ask for; none: the first that the server lists.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.", min=1)] = 8,
    json: Annotated[Path | None, typer.Option(help="Write the whole run to this file.")] = None,
) -> None:
    """Ask a served model questions with known answers; count by family, with 95 % intervals.

    Examples:

        baltoro bench eval

        baltoro bench eval --url http://127.0.0.1:8000 --families add_sub,tools --limit 20 --json run.json
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from baltoro.bench.evaluate import as_json, ask_all, first_model, report
    from baltoro.bench.questions import read_questions, select

    wanted = [name.strip() for name in families.split(",") if name.strip()]
    asked = select(read_questions(questions), wanted, limit)
    name = model or first_model(url)
    with Progress(transient=True) as bar:
        task = bar.add_task("questions", total=len(asked))
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
