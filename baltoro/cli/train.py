"""`baltoro train`: train a model from a recipe, with a progress bar; go on after a stop; export the result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from baltoro.trainer.config import TrainConfig
    from baltoro.trainer.loop import Progress
    from baltoro.trainer.run import Run


def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file of recipes/.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key: --set optim.lr=0.005.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default: runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the folder.")] = False,
    export: Annotated[
        Path | None, typer.Option(help="Model folder to write at the end: published layout, MXFP4 experts.")
    ] = None,
    stop_after: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop with a checkpoint when so much time has passed.")
    ] = None,
    compact: Annotated[
        Path | None,
        typer.Option(help="Folder for a small form of every checkpoint; a run without one goes on from what is there."),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw loss.png and load.png (needs the extra `train`).")] = False,
) -> None:
    """Train a model from a recipe.

    The corpora are built first if they are missing. Every minute the whole state is written to OUT/checkpoints: a run
    that was stopped in any way goes on with `--resume`, on a CPU with the same numbers as if it had never stopped.

    Examples:

        baltoro train recipes/mini.toml --export models/mini

        baltoro train recipes/mini.toml --set steps=200 --out runs/short

        baltoro train recipes/mini.toml --resume

        baltoro train recipes/mini.toml --compact runs/carry --stop-after 540
    """
    from rich.console import Console

    from baltoro.config import load_config
    from baltoro.trainer.config import TrainConfig

    config = load_config(TrainConfig, recipe, overrides or ())
    out = out or Path("runs") / config.name
    console = Console()
    _build_data(config, console)
    run = _train(config, out, console, resume=resume, stop_after_s=stop_after, compact=compact)
    console.print(f"{run.step} of {config.steps} steps are done; log and checkpoints in {out}")
    if run.step < config.steps:
        console.print("go on with --resume")
    if export is not None:
        from baltoro.trainer.export import export as write_model

        write_model(run.model, export, tokenizer=config.data.folder)
        total = sum(path.stat().st_size for path in export.iterdir() if path.is_file())
        console.print(f"model in {export}, {total / 1e6:.2f} MB")
    if plot:
        from baltoro.trainer.plot import plot_run

        console.print("plots:", *(str(path) for path in plot_run(out)))


def _build_data(config: TrainConfig, console: Console) -> None:
    """Run the recipe's builder if the data folder is not there. Errors: ConfigError with the command that failed."""
    from baltoro.errors import ConfigError
    from baltoro.trainer.corpus import MANIFEST

    folder, builder = config.data.folder, config.data.builder
    if (folder / MANIFEST).is_file():
        return
    if builder is None or not builder.is_file():
        wanted = f"python {builder} --out {folder}" if builder else "the script that writes it"
        raise ConfigError(f"{folder} holds no corpora; run {wanted} from the root of the repository")
    command = [sys.executable, str(builder), "--out", str(folder)]
    console.print(f"{folder} is missing, building it: {' '.join(command)}")
    if subprocess.run(command, check=False).returncode != 0:
        raise ConfigError(f"the data were not built; see above, and try again: {' '.join(command)}")


def _train(
    config: TrainConfig,
    out: Path,
    console: Console,
    *,
    resume: bool,
    stop_after_s: float | None,
    compact: Path | None,
) -> Run:
    """The loop under a progress bar. Held-out losses are printed above it as they come."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from baltoro.trainer.loop import train as train_loop

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("starting", total=config.steps)

        def show(progress: Progress) -> None:
            record = progress.record
            speed = record.tokens / progress.step_s
            bar.update(task, completed=record.step, description=f"loss {record.loss:.3f}, {speed:,.0f} tokens/s")
            if progress.held_out is not None:
                losses = ", ".join(f"{name} {loss:.3f}" for name, loss in progress.held_out.items())
                bar.console.print(f"step {record.step}: held-out loss {losses}")

        return train_loop(config, out, resume=resume, listener=show, stop_after_s=stop_after_s, compact=compact)
