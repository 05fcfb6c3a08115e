"""How far a call of `LLM` has come, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def no_bar(num_tokens: int, is_done: bool) -> None:
    """Says nothing."""


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, bool], None]]:
    """A bar on stderr: completions done, tokens a second."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generate", total=total, tokens=0)
        num_tokens = 0

        def advance(more: int, is_done: bool) -> None:
            nonlocal num_tokens
            num_tokens += more
            bar.update(task, advance=int(is_done), tokens=num_tokens)

        yield advance
