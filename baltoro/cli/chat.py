"""`baltoro chat`: talk to a model in the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baltoro.cli.memory import CacheOptions, takes_cache_options

if TYPE_CHECKING:
    from rich.console import Console

    from baltoro.cli.talk import Talker

_HELP = "/reset forgets the conversation, /exit leaves (so does Ctrl-D); Ctrl-C stops an answer."


@takes_cache_options
def chat(
    model: Annotated[
        Path | None, typer.Argument(help="Model folder. Default: BALTORO_MODEL, else the one in models/.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to this server instead of starting one: http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of that server; @FILE reads it from a file.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Whether the model thinks first.")] = True,
    effort: Annotated[str | None, typer.Option(help="How hard to think: low, high or max.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of one answer.")] = None,
    *,
    cache: CacheOptions,
) -> None:
    """Talk to a model in the terminal. Thoughts are dimmed.

    /reset forgets the conversation, /exit leaves; Ctrl-C stops an answer. Lines can also be piped in.

    Examples:

        baltoro chat

        baltoro chat models/mini --no-thinking --temperature 0

        baltoro chat --url http://127.0.0.1:8000 --system "Answer in one word."
    """
    from rich.console import Console

    from baltoro.cli.box import find_model
    from baltoro.cli.options import read_key
    from baltoro.cli.serve import READY
    from baltoro.cli.talk import Talker, own_server
    from baltoro.errors import ConfigError

    console = Console(highlight=False)
    options: dict[str, Any] = {"chat_template_kwargs": {"thinking": thinking}}
    for name, value in (("reasoning_effort", effort), ("temperature", temperature), ("max_tokens", max_tokens)):
        if value is not None:
            options[name] = value
    if url is not None and cache.arguments():
        raise ConfigError(
            f"{cache.arguments()[0]} is an option of the server at --url: give it to `baltoro serve` there"
        )
    with contextlib.ExitStack() as stack:
        if url is None:
            with console.status("starting the engine"):
                url = stack.enter_context(own_server([str(find_model(model)), *cache.arguments()], READY))
        talker = Talker(url, read_key(api_key))
        console.print(f"[dim]{talker.model()}. {_HELP}[/dim]")
        converse(talker, console, options, [] if system is None else [{"role": "system", "content": system}])


def converse(talker: Talker, console: Console, options: dict[str, Any], start: list[dict[str, Any]]) -> None:
    """Read lines and print answers until the user leaves. An answer that fails is not part of the conversation."""
    from baltoro.errors import BaltoroError

    messages = list(start)
    for line in _lines(console):
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
            console.print("[dim]forgotten[/dim]")
        elif line.startswith("/"):
            console.print(f"[dim]{_HELP}[/dim]")
        else:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                messages = [*asked, _answer(talker, console, options | {"messages": asked})]
            except BaltoroError as error:
                console.print(f"\n{error}", style="red", markup=False)


def _lines(console: Console) -> Iterator[str]:
    """What the user types, line by line, without empty lines."""
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line:
            yield line


def _answer(talker: Talker, console: Console, body: dict[str, Any]) -> dict[str, Any]:
    """Print one answer as it comes; the message it makes. Ctrl-C keeps what is there."""
    said = {"reasoning": "", "content": ""}
    with contextlib.closing(talker.stream(body)) as pieces, contextlib.suppress(KeyboardInterrupt):
        for kind, text in pieces:
            if kind == "content" and said["reasoning"] and not said["content"]:
                console.print()
            said[kind] += text
            console.print(text, end="", markup=False, style="dim" if kind == "reasoning" else None, soft_wrap=True)
    console.print()
    message = {"role": "assistant", "content": said["content"]}
    return message | ({"reasoning_content": said["reasoning"]} if said["reasoning"] else {})
