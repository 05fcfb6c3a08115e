"""The verbs. Part of the `__main__` room: the only place that introduces rooms to each other.

A verb is one module with one function of the same name; typer makes its options from the signature.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

# verb -> one line for `baltoro --help`; the order is that of the help
VERBS = {
    "serve": "Serve a model over the OpenAI API.",
    "chat": "Talk to a model in the terminal.",
    "generate": "Complete prompts offline.",
    "train": "Train a model from a recipe.",
    "rl": "Improve a model by reinforcement learning on tasks that judge themselves.",
    "rl-engine": "Run the engine of an RL run on this host, for a trainer on another.",
    "inspect": "Check every tensor name, shape and byte of a checkpoint or index.",
    "sizes": "Parameters, bytes per token and per request, what fits into memory.",
    "convert": "Rewrite a checkpoint: quantise, dequantise, reshard.",
    "explain": "Which kernel runs where, and why.",
    "compare": "What two builds or layouts compute, tensor by tensor, and where they part.",
    "bench": "Measure.",
    "cache-trace": "Replay a request trace against the memory, without a model.",
}


def _module(verb: str) -> str:
    return f"baltoro.cli.{verb.replace('-', '_')}"


class LazyVerbs(TyperGroup):
    """Looks a verb up by importing its module only then."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [verb for verb in VERBS if find_spec(_module(verb)) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(_module(cmd_name))
        if hasattr(module, "app"):
            return get_command(module.app)
        single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        single.command(name=cmd_name)(getattr(module, cmd_name.replace("-", "_")))
        return get_command(single)


app = typer.Typer(
    cls=LazyVerbs,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train, post-train and serve models of the Kimi K3 architecture.",
)


@app.callback()
def _root() -> None:
    """Train, post-train and serve models of the Kimi K3 architecture."""
