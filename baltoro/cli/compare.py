"""`baltoro compare`: what two builds or layouts of a model compute, tensor by tensor, and where they part.

`baltoro compare dump` writes what a model computes; anything else after `compare` is read as dumps to be compared.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from baltoro.model.dump_layout import View

HELP = """Compare what two builds or layouts of a model compute, tensor by tensor, and show where they part.

    baltoro compare dump models/mini --out a --measure-floor rounding

    baltoro compare dump models/mini --out b --kernels reference

    baltoro compare a b

The first command is run with one build, the second with the other (another commit, dtype, device, kernel); the third
ends with 1 at the first tensor that differs by more than noise. With `--gradients` the backward is dumped as well.
"""


class DumpOrCompare(TyperGroup):
    """Whatever is no sub-command is the folders of `compare A B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["folders", *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, "folders")


app = typer.Typer(cls=DumpOrCompare, add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", help=HELP)


class Kernels(StrEnum):
    """Which implementations run."""

    auto = "auto"
    reference = "reference"


class Floor(StrEnum):
    """What the second run does otherwise."""

    none = "none"
    order = "order"
    rounding = "rounding"


@app.command()
def dump(
    model: Annotated[Path, typer.Argument(help="Model folder.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist or be empty.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text to run. Default: 150 ids spread over the vocabulary.")
    ] = None,
    ids: Annotated[Path | None, typer.Option(help="File with token ids instead: numbers, or a JSON list.")] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Also the gradients of the mean next-token loss.")
    ] = False,
    layers: Annotated[str, typer.Option(help="Dump only these layers, such as 0-3,7. All are run.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float32 or float64.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    kernels: Annotated[
        Kernels, typer.Option(help="auto: what `baltoro explain` names; reference: plain torch throughout.")
    ] = Kernels.auto,
    inference: Annotated[
        bool, typer.Option("--inference", help="The engine's branches of the layers instead of the trainer's.")
    ] = False,
    measure_floor: Annotated[
        Floor,
        typer.Option(
            help="Run a second time and note how far it is from the first. order: other shapes and threads, for builds "
            "that run the same kernels. rounding: besides, each weight moved by up to one rounding of its dtype, for "
            "other kernels and for two dtypes."
        ),
    ] = Floor.none,
) -> None:
    """Run a model on a prompt and write every layer's output, attention, MoE and router logits, in files.

    One layer's weights are in memory at a time, so a model need not fit.

    Examples:

        baltoro compare dump models/mini --out a --prompt "The list" --gradients --measure-floor rounding

        baltoro compare dump models/mini --out b --dtype float64 --layers 0-3
    """
    from baltoro.cli.compare_show import build_facts
    from baltoro.model.dump import streamed
    from baltoro.model.dump_run import Run, write_dump
    from baltoro.model.dump_run import measure_floor as measure
    from baltoro.model.weights import torch_dtype

    source = streamed(model, dtype=None if dtype == "auto" else torch_dtype(dtype), device=device)
    run = Run(
        ids=_prompt_ids(model, prompt, ids, source.model.config.vocab_size),
        has_gradients=gradients,
        is_training=not inference,
        is_oracle=kernels is Kernels.reference,
        layers=_layers(layers),
        device=device,
    )
    facts = build_facts() | {"model": str(model), "prompt": prompt, "kernels": kernels.value, "device": device}
    manifest = write_dump(source, out, run, facts=facts)
    loss = "" if manifest.loss is None else f"; loss {manifest.loss:.6f}"
    print(f"wrote {len(manifest.tensors):,} tensors of {len(run.ids)} tokens to {out}{loss}")
    if measure_floor is not Floor.none:
        kind: Literal["order", "rounding"] = "order" if measure_floor is Floor.order else "rounding"
        floor = _otherwise(lambda: measure(source, out, run, kind))
        name, largest = max(floor.items(), key=lambda item: item[1])
        print(f"noise floor by {measure_floor.value}: at most {largest:.2e}, at {name}")


@app.command(name="folders")
def compare(
    dumps: Annotated[list[Path], typer.Argument(metavar="A [A ...] B", help="Dumps. The last is B, the rest are A.")],
    rtol: Annotated[float | None, typer.Option(help="Largest relative L2 of a tensor.", min=0)] = None,
    times: Annotated[
        float | None,
        typer.Option(help="So many noise floors. Default, without --rtol: 10, or 3 for a floor by rounding.", min=0),
    ] = None,
    floor: Annotated[
        Path | None, typer.Option(help="Dump of A made again otherwise; the floor is how far it is from A.")
    ] = None,
    ignore: Annotated[
        str | None, typer.Option(help="Leave names out in which this regular expression is found.")
    ] = None,
    map: Annotated[
        list[str] | None,
        typer.Option(help="Rule for another layout, or a file with one a line; see below. May be given again."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every number to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the differences into this file (extra `train`).")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print every row.")] = False,
) -> None:
    """Compare dumps: what `baltoro compare A B` runs. Ends with 1 where they differ, or where nothing was compared.

    A tensor is good if its relative L2, |A - B| / |A|, is within --rtol and within --times noise floors, whichever are
    given. Without a floor and without --rtol, tensors must be equal. Names that only one side has, NaN, other shapes
    and an empty comparison fail.

    Layouts: several A are the shards of one run. `rows=REGEX` and `columns=REGEX` join shards along the first or last
    dimension, `sum=REGEX` adds them, `first=REGEX` takes one; `experts` takes stacked experts apart, so that they meet
    per-expert names; `rename=REGEX=>TEXT` renames. A regular expression matches a whole name.

    Examples:

        baltoro compare a b --rtol 1e-5

        baltoro compare a b --floor again --times 5 --json differences.json

        baltoro compare rank0 rank1 whole --map experts --map "columns=.*q_proj.*" --map "sum=layers.*attention"
    """
    from baltoro.cli.compare_show import draw, show, write_json
    from baltoro.errors import ConfigError
    from baltoro.model.dump_compare import Limits
    from baltoro.model.dump_compare import compare as hold_together
    from baltoro.model.dump_files import Dump
    from baltoro.model.dump_layout import View, parse_rules

    if len(dumps) < 2:
        raise ConfigError("give two dumps or more: baltoro compare A B; `baltoro compare dump` makes one")
    rules = parse_rules(_rule_lines(map or []))
    *shards, whole = (Dump(folder) for folder in dumps)
    a, b = View(shards, rules), View([whole], rules)
    third: View | None = None if floor is None else View([Dump(floor)], rules)
    report = hold_together(a, b, limits=Limits(rtol, times), floor=third, ignore=ignore)
    show(report, a, b, is_whole=show_all)
    if json is not None:
        write_json(json, report, a, b)
        print(f"wrote {json}")
    if plot is not None:
        draw(report, plot)
        print(f"wrote {plot}")
    if not report.is_good:
        raise typer.Exit(1)


def _prompt_ids(folder: Path, prompt: str | None, ids: Path | None, vocab_size: int) -> tuple[int, ...]:
    """From the text, the file, or neither. Errors: ConfigError."""
    import re

    from baltoro.errors import ConfigError

    if prompt is not None and ids is not None:
        raise ConfigError("give --prompt or --ids, not both")
    if prompt is not None:
        from baltoro.chat.tokenizer import Tokenizer

        return tuple(Tokenizer.load(folder).encode(prompt))
    if ids is None:
        from baltoro.model.dump_run import default_ids

        return default_ids(vocab_size)
    if not ids.is_file():
        raise ConfigError(f"{ids} is no file; it should hold token ids")
    words = ids.read_text(encoding="utf-8").strip().removeprefix("[").removesuffix("]")
    found = [word for word in re.split(r"[\s,]+", words) if word]
    if wrong := [word for word in found if re.fullmatch(r"[0-9]{1,9}", word) is None]:
        raise ConfigError(f"{ids}: {wrong[0]!r} is no token id")
    return tuple(int(word) for word in found)


def _layers(text: str) -> frozenset[int] | None:
    """0-3,7 as numbers. Errors: ConfigError."""
    import re

    from baltoro.errors import ConfigError

    if not text:
        return None
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"--layers {text!r} is not like 0-3,7")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def _rule_lines(given: list[str]) -> list[str]:
    """Rules; those of a file in its place."""
    lines: list[str] = []
    for text in given:
        is_file = "=" not in text and Path(text).is_file()
        found = Path(text).read_text(encoding="utf-8").splitlines() if is_file else [text]
        lines += [line for line in map(str.strip, found) if line and not line.startswith("#")]
    return lines


def _otherwise(work: Any) -> Any:
    """Do it with another number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        return work()
    finally:
        torch.set_num_threads(before)
