"""No state at module level: constants in capitals, never written to after their module is loaded.

Allowed: constants and tables (CAPITALS), type names and type variables (CapWords), dunder names, functions given a
name of their own. Caches of pure functions (`functools.cache`) are allowed by docs/design.md 3.2, rule 15.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.tree import files, parse, place

CONSTANT = re.compile(r"_{0,2}[A-Z][A-Z0-9_]*$")
TYPE_NAME = re.compile(r"_?[A-Z][A-Za-z0-9]*$")
DUNDER = re.compile(r"__\w+__$")
# lower-case names that a library expects
EXPECTED = {
    ("baltoro/cli/__init__.py", "app"): "typer's application object",
    ("baltoro/cli/bench.py", "app"): "typer's group of the verb",
    ("baltoro/cli/compare.py", "app"): "typer's group of the verb",
}

MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard"}
MUTATORS |= {"appendleft", "popleft", "sort", "reverse", "__setitem__", "__delitem__"}


def bindings(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """(name, statement) of what module-level statements assign, also below `if` and `try`."""
    for node in module.body:
        yield from _bindings(node)


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Assign):
        targets: list[ast.expr] = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
        targets = [node.target]
    else:
        targets = []
    for target in targets:
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                yield name.id, node
    if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
        for child in ast.iter_child_nodes(node):
            yield from _bindings(child)


def state_names(file: Path) -> list[str]:
    """Module-level names that are neither a constant nor a type."""
    return [
        f"{place(file, node)}: {name}"
        for name, node in bindings(parse(file))
        if not (CONSTANT.match(name) or TYPE_NAME.match(name) or DUNDER.match(name))
        and (place(file), name) not in EXPECTED
    ]


def writes(file: Path) -> list[str]:
    """Places inside functions that change a constant, their own module's or an imported one."""
    module = parse(file)
    names = {name for name, _ in bindings(module)}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    names = {name for name in names if CONSTANT.match(name)}
    return [place(file, node) for node in ast.walk(module) if _written(node) in names]


def _written(node: ast.AST) -> str | None:
    """The capital name that a statement or call changes: NAME[...] = x, del NAME[...], NAME.append(x), NAME.x = y."""
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        target = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        target = node.func.value
    else:
        return None
    while isinstance(target, ast.Subscript | ast.Attribute):
        if isinstance(target, ast.Attribute) and CONSTANT.match(target.attr):
            return target.attr
        target = target.value
    return target.id if isinstance(target, ast.Name) else None


def global_statements(file: Path) -> list[str]:
    return [place(file, node) for node in ast.walk(parse(file)) if isinstance(node, ast.Global)]


def test_no_global_statement() -> None:
    hits = [hit for file in files() for hit in global_statements(file)]
    assert not hits, f"hand the object over instead: {hits}"


def test_module_level_names_are_constants_or_types() -> None:
    hits = [hit for file in files() for hit in state_names(file)]
    assert not hits, f"a constant is in capitals; anything that changes lives in an object: {hits}"


def test_constants_are_never_written_to() -> None:
    hits = [hit for file in files() for hit in writes(file)]
    assert not hits, f"state at module level: {hits}"


def test_expected_names_are_still_there() -> None:
    present = {(place(file), name) for file in files() for name, _ in bindings(parse(file))}
    assert EXPECTED.keys() <= present


@pytest.mark.parametrize(
    "text",
    [
        "TABLE = {}\ndef f():\n    TABLE['a'] = 1",
        "TABLE = []\ndef f():\n    TABLE.append(1)",
        "TABLE = {'a': []}\ndef f():\n    TABLE['a'].append(1)",
        "TABLE = {}\ndef f():\n    del TABLE['a']",
        "from baltoro.config import ENVIRONMENT\ndef f():\n    ENVIRONMENT.update(a='b')",
    ],
)
def test_a_write_to_a_constant_is_found(tmp_path: Path, text: str) -> None:
    file = tmp_path / "sample.py"
    file.write_text(text)
    assert len(writes(file)) == 1


@pytest.mark.parametrize("text", ["cache = {}", "if x:\n    current: int = 0", "for table in (1, 2):\n    A = 1"])
def test_a_module_level_variable_is_found(tmp_path: Path, text: str) -> None:
    file = tmp_path / "sample.py"
    file.write_text(text)
    assert len(state_names(file)) == 1
