"""The package as text: its files, rooms and syntax trees. What the contract tests read instead of importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "baltoro"
NIGHTLY = pytest.StashKey[list[str]]()
"""In pytest's config: ids of the collected tests that are marked `nightly`. Written by tests/conftest.py."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(folder: Path = PACKAGE) -> list[Path]:
    """Every Python file below `folder`, sorted."""
    return sorted(folder.rglob("*.py"))


@cache
def parse(file: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def place(file: Path, node: ast.AST | None = None) -> str:
    """`baltoro/model/mla.py:12`."""
    name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
    return f"{name}:{node.lineno}" if node is not None and hasattr(node, "lineno") else name


def room(file: Path, package: Path = PACKAGE) -> str:
    """The first part below the package; a module at the top is a room of its own, and the verbs are `__main__`'s."""
    first = file.relative_to(package).parts[0].removesuffix(".py")
    return "__main__" if first == "cli" else first


def module_name(file: Path, package: Path = PACKAGE) -> str:
    """Dotted name to import a file by."""
    parts = [package.name, *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """(qualified name, definition) of every function, methods and inner functions included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield f"{prefix}{child.name}", child
            yield from functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")
        else:
            yield from functions(child, prefix)


def calls(node: ast.AST, name: str) -> Iterator[ast.Call]:
    """Calls of `name` as it is written, such as `print` or `time.sleep`."""
    for child in ast.walk(node):
        if isinstance(child, ast.Call) and ast.unparse(child.func) == name:
            yield child
