"""`baltoro rl`: improve a model by reinforcement learning on tasks that judge themselves; a live table meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from baltoro.rl.recipe import RLConfig

ROWS = 12  # of the live table
COLUMNS = ["step", "reward", "eval", "greedy", "k3", "dlogp", "norm", "len", "old", "same", "clip", "canary", "s"]


def rl(
    recipe: Annotated[Path, typer.Argument(help="A TOML file, recipes/rl-*.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key: --set optim.lr=0.001.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default: runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the folder.")] = False,
    stop_after: Annotated[
        float | None,
        typer.Option(help="Seconds after which to end with an evaluation and a checkpoint; --resume goes on."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Memory, bytes and tokens by arithmetic; refuse what cannot work; load nothing."
        ),
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(metavar="DUMP", help="Train on dumped rollouts (a run's folder, or a file) instead.")
    ] = None,
    rescore: Annotated[
        str | None,
        typer.Option(
            metavar="REWARD", help="Judge dumped rollouts (--replay) again: task, or PACKAGE.MODULE:FUNCTION."
        ),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Folder for the adapter at the end: safetensors and adapter_config.json.")
    ] = None,
) -> None:
    """Reinforcement learning with verifiable rewards (RLVR): tasks -> rollouts -> rewards -> one step of a LoRA.

    The engine samples, the trainer moves the adapter, the engine gets it back, and every step checks that the two speak
    of one policy. Logs, plots, dumped rollouts and checkpoints lie in OUT; docs/rl.md explains the table.

    Examples:

        baltoro rl recipes/rl-mini.toml --dry-run

        baltoro rl recipes/rl-mini.toml --export adapters/sums

        baltoro rl recipes/rl-mini.toml --set algorithm=kimi --set partial.share=0.5 --out runs/kimi

        baltoro rl recipes/rl-mini.toml --resume --stop-after 540

        baltoro rl recipes/rl-mini.toml --set engine.place=tcp://gpu-host:7400

        baltoro rl recipes/rl-mini.toml --replay runs/rl-mini --set optim.lr=0.001

        baltoro rl recipes/rl-mini.toml --replay runs/rl-mini --rescore mypackage.rewards:strict
    """
    from rich.console import Console

    from baltoro.config import load_config
    from baltoro.rl.recipe import RLConfig

    began = time.monotonic()
    config = load_config(RLConfig, recipe, overrides or ())
    console = Console()
    out = out or Path("runs") / config.name
    _show_plan(config, console)
    if dry_run:
        return
    if rescore is not None:
        _rescore(config, replay or out, rescore, console)
    elif replay is not None:
        _replay(config, replay, console)
    else:
        until = None if stop_after is None else began + stop_after
        _run(config, out, console, resume=resume, export=export, until=until)


def _show_plan(config: RLConfig, console: Console) -> None:
    """The dry run's page. Errors: ConfigError for what cannot work."""
    from baltoro.model.config import K3Config
    from baltoro.rl.config import table
    from baltoro.rl.parts import engine_config
    from baltoro.rl.plan import choices, make_plan

    plan = make_plan(config, K3Config.load(config.model), engine_config(config))
    pool = "resolved when the engine starts" if plan.pool_bytes is None else _bytes(plan.pool_bytes)
    activations = f"about {_bytes(plan.activation_bytes)} activations"
    activations += "" if config.engine.sleeps or plan.is_remote else "; the engine keeps its pool"
    there = f" (at {config.engine.place})" if plan.is_remote else ""
    rows = [
        ("engine", _place(config)),
        ("base", f"{_bytes(plan.base_bytes)} on disk, resident {plan.num_bases}x{' on each host' if there else ''}"),
        ("adapter", f"{_bytes(plan.adapter_bytes)}, {plan.adapter_parameters:,} parameters"),
        ("engine's slots", _bytes(plan.slot_bytes) + there),
        ("optimizer", _bytes(plan.optimizer_bytes)),
        ("every phase", _bytes(plan.resident_bytes)),
        ("rollout phase, besides", f"engine's pool: {pool}{there}"),
        ("training phase, besides", f"{_bytes(plan.gradient_bytes)} gradients, {activations}"),
        ("publication", f"{_bytes(plan.sync_bytes)} in {plan.sync_tensors} tensors a step"),
        ("step", f"{plan.attempts} attempts, at most {plan.most_tokens:,} sampled tokens; {config.steps} steps"),
    ]  # fmt: skip
    if plan.route_bytes:
        rows.append(("routes replayed", f"{plan.route_bytes} bytes a token, with the rollouts and in their dumps"))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(f"{name:{width}}  {text}", highlight=False, soft_wrap=True)
    console.print("\n" + table(choices(config)) + "\n", highlight=False, soft_wrap=True)


def _place(config: RLConfig) -> str:
    """Where the engine runs, in words."""
    if not config.engine.is_remote:
        return config.engine.place
    from baltoro.config import environment
    from baltoro.rl.engine_remote import TOKEN

    missing = "" if environment(TOKEN) else f", and {TOKEN} is not set here"
    return f"at {config.engine.place}, started there by `baltoro rl-engine`{missing}"


def _bytes(count: int) -> str:
    from baltoro.cli.units import format_bytes

    return format_bytes(count)


def _run(
    config: RLConfig, out: Path, console: Console, *, resume: bool, export: Path | None, until: float | None
) -> None:
    """The loop under a live table."""
    from rich.live import Live

    from baltoro.model.adapter import save_adapter
    from baltoro.rl.loop import run
    from baltoro.rl.parts import open_parts

    lines: list[Mapping[str, Any]] = []
    parts = open_parts(config)
    try:
        with Live(make_table(lines, config), console=console, refresh_per_second=4) as live:

            def show(line: Mapping[str, Any]) -> None:
                lines.append(line)
                live.update(make_table(lines, config))
                every = config.save.plot_every_steps
                if every and line["step"] and line["step"] % every == 0:
                    _plot(out, live.console)

            run(parts, out, resume=resume, listener=show, until=until)
        if export is not None:
            save_adapter(parts.trainer.adapter(), export, parts.trainer.model.config)
            console.print(f"adapter in {export}; serve it: baltoro serve {config.model} --max-loras 1 "
                          f"--lora-modules {config.name}={export}", soft_wrap=True)  # fmt: skip
    finally:
        parts.close()
    _plot(out, console)
    _summary(out, console)


def _plot(out: Path, console: Console) -> None:
    from baltoro.errors import ConfigError
    from baltoro.rl.plot import plot_run

    try:
        console.print(f"plots: {plot_run(out)}")
    except ConfigError as error:  # matplotlib is an extra
        console.print(str(error))


def _summary(out: Path, console: Console) -> None:
    from baltoro.rl.log import read_log

    evals = [line["eval"] for line in read_log(out) if "eval" in line]
    first, last = evals[0], evals[-1]
    for name in ("sampled", "greedy"):
        change = 100 * (last[name] - first[name])
        console.print(f"held out, {name}: {first[name]:.1%} -> {last[name]:.1%} ({change:+.1f} points)")
    console.print(f"95 % half-width of sampled: {first['half_width']:.1%}, {last['half_width']:.1%}; log in {out}")


def make_table(lines: list[Mapping[str, Any]], config: RLConfig) -> Table:
    """The last rows; docs/rl.md says what the columns mean."""
    from rich.table import Table

    name = f"{config.name}: {lines[-1]['step'] if lines else 0} of {config.steps} steps"
    table = Table(title=name, box=None, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines[-ROWS:]:
        table.add_row(*cells(line, config.checks.canary_floor))
    return table


def cells(line: Mapping[str, Any], floor: float) -> list[str]:
    """One row's words."""
    held_out, canary = line.get("eval"), line.get("canary")
    if held_out is not None and not isinstance(held_out, Mapping):
        held_out = {"sampled": held_out.sampled, "greedy": held_out.greedy}
    clip = None if line.get("clip_low") is None else line["clip_low"] + line["clip_high"]
    seen = "" if canary is None else (f"x{canary['ratio']:.3g}" if canary["ratio"] >= floor else "not yet")
    if canary is not None and canary["own_effect"] == 0.0:
        seen = "not yet"
    return [
        str(line["step"]),
        _number(line.get("reward"), ".3f"),
        _number(None if held_out is None else held_out["sampled"], ".0%"),
        _number(None if held_out is None else held_out["greedy"], ".0%"),
        _number(line.get("k3"), ".1e"),
        _number(line.get("max_dlogp"), ".1e"),
        _number(line.get("adapter_norm"), ".1f"),
        _number(line.get("length_mean"), ".0f"),
        _number(line.get("staleness_max"), ".0f"),
        _number(line.get("zero_std"), ".0%"),
        _number(clip, ".1%"),
        seen,
        _number(line.get("step_s"), ".1f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _replay(config: RLConfig, dumps: Path, console: Console) -> None:
    from baltoro.rl.log import read_dumps
    from baltoro.rl.replay import replay

    lines: list[Mapping[str, Any]] = []
    replay(config, read_dumps(dumps), lines.append)
    console.print(make_table(lines, config))


def _rescore(config: RLConfig, dumps: Path, reward: str, console: Console) -> None:
    from baltoro.rl.log import read_dumps
    from baltoro.rl.replay import rescore

    found = rescore(config, read_dumps(dumps), reward)
    before, after = found.means
    console.print(f"{len(found.new)} trajectories judged again, {found.excluded} excluded: {before:.3f} -> {after:.3f}")
    for (old, new), count in sorted(found.moved.items()):
        console.print(f"  {old} -> {new}: {count}", highlight=False)
