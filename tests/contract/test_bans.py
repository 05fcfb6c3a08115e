"""Words that may stand in some files only: broad excepts, environment variables, print, sleeps, .cuda()."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.tree import ROOT, calls, files, parse, place, room


def broad_excepts(file: Path) -> Iterator[ast.AST]:
    """`except:`, `except Exception`, `except BaseException`, alone or in a tuple; contextlib.suppress likewise."""
    broad = {"Exception", "BaseException", "builtins.Exception"}
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or ast.unparse(kind) in broad for kind in kinds):
                yield node
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            yield from (argument for argument in node.args if ast.unparse(argument) in broad)


def silent_excepts(file: Path) -> Iterator[ast.AST]:
    """Handlers that do nothing at all."""
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body):
            yield node


def environment_reads(file: Path) -> Iterator[ast.AST]:
    """os.environ, os.getenv, os.putenv in any spelling."""
    names = {"environ", "getenv", "putenv", "environb"}
    for node in ast.walk(parse(file)):
        is_attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
        if is_attribute or _imports_from(node, "os", names):
            yield node


def _imports_from(node: ast.AST, module: str, names: set[str]) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == module and bool(names & {a.name for a in node.names})


def sleeps(file: Path) -> Iterator[ast.AST]:
    """time.sleep: a test waits for something that happens, not for a time to pass."""
    yield from calls(parse(file), "time.sleep")
    for node in ast.walk(parse(file)):
        if _imports_from(node, "time", {"sleep"}):
            yield node


def cuda_moves(file: Path) -> Iterator[ast.AST]:
    """`x.cuda()`: where a tensor lies is decided by who owns the device."""
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield node


def found(search: object, where: list[Path]) -> list[str]:
    """Places as lines for people."""
    assert callable(search)
    return [place(file, node) for file in where for node in search(file)]


def test_nothing_is_caught_broadly() -> None:
    hits = found(broad_excepts, files())
    assert not hits, f"catch what you can do something about, by its name: {hits}"


def test_no_error_is_dropped_silently() -> None:
    hits = found(silent_excepts, files())
    assert not hits, f"an except that only passes hides the error: {hits}"


def test_environment_variables_are_read_in_config_only() -> None:
    hits = found(environment_reads, [file for file in files() if room(file) != "config"])
    assert not hits, f"use baltoro.config.environment and its table: {hits}"


def test_only_verbs_print() -> None:
    hits = [place(file, call) for file in files() if room(file) != "__main__" for call in calls(parse(file), "print")]
    assert not hits, f"print belongs to __main__, cli and scripts: {hits}"


def test_tests_do_not_sleep() -> None:
    hits = found(sleeps, files(ROOT / "tests"))
    assert not hits, f"wait for the event, with a time limit: {hits}"


def test_only_owners_of_a_device_call_cuda() -> None:
    hits = found(cuda_moves, [file for file in files() if room(file) not in ("engine", "trainer", "kernels")])
    assert not hits, f"pass a device instead: {hits}"


@pytest.mark.parametrize(
    ("search", "text"),
    [
        (broad_excepts, "try:\n    f()\nexcept:\n    g()"),
        (broad_excepts, "try:\n    f()\nexcept (KeyError, Exception) as error:\n    g()"),
        (broad_excepts, "with contextlib.suppress(Exception):\n    f()"),
        (silent_excepts, "try:\n    f()\nexcept KeyError:\n    pass"),
        (environment_reads, "import os\nx = os.environ['HOME']"),
        (environment_reads, "from os import getenv"),
        (sleeps, "import time\ntime.sleep(1)"),
        (sleeps, "from time import sleep"),
        (cuda_moves, "y = x.cuda()"),
    ],
)
def test_each_search_finds_what_it_is_for(tmp_path: Path, search: object, text: str) -> None:
    file = tmp_path / "sample.py"
    file.write_text(text)
    assert len(found(search, [file])) == 1
