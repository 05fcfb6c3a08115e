"""Who may import whom: the table of docs/design.md 1.3, held against every import statement of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.contract.tree import PACKAGE, ROOT, files, parse, place, room

# room -> rooms that it may import; `__main__` (with cli/) may import every room
ALLOWED: dict[str, str] = {
    "errors": "",
    "config": "errors",
    "observe": "errors",
    "protocol": "errors",
    "kernels": "errors config",
    "parallel": "errors observe",
    "transfer": "errors observe",
    "sandbox": "errors observe",
    "chat": "errors protocol",
    "router": "errors config observe protocol",
    "model": "errors kernels parallel",
    "cache": "errors observe kernels parallel",
    "envs": "errors observe protocol chat sandbox",
    "server": "errors config observe protocol chat",
    "engine": "errors config observe protocol kernels parallel transfer model cache",
    "trainer": "errors config observe kernels parallel transfer model",
    "llm": "errors config protocol chat engine",
    "rl": "errors config observe protocol chat transfer sandbox model engine trainer envs llm",
    "bench": "errors config observe protocol chat kernels model cache engine trainer llm",
    "__init__": "",  # public names are loaded on first use
}
EVERY_ROOM = "__main__"


def edges(package: Path) -> set[tuple[str, str, str]]:
    """(room, imported room, place) of each import of the package inside itself, wherever in a file it stands.

    Imports for the type checker alone do not count. Relative imports are the linter's to ban. A module named in a
    call of import_module counts, if it is written out.
    """
    found = set()
    for file in files(package):
        home = room(file, package)
        for node, names in _imports(parse(file), package.name):
            for name in names:
                head, _, rest = name.partition(".")
                other = rest.split(".")[0]
                other = EVERY_ROOM if other == "cli" else other
                if head == package.name and other and other != home:
                    found.add((home, other, place(file, node)))
    return found


def _imports(node: ast.AST, package: str) -> list[tuple[ast.AST, list[str]]]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return [hit for child in node.orelse for hit in _imports(child, package)]
    hits: list[tuple[ast.AST, list[str]]] = []
    if isinstance(node, ast.Import):
        hits.append((node, [alias.name for alias in node.names]))
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        whole = node.module == package  # `from baltoro import errors` names rooms, not things of a room
        hits.append((node, [f"{package}.{alias.name}" for alias in node.names] if whole else [node.module]))
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        hits.append((node, [str(given.value) for given in node.args[:1] if isinstance(given, ast.Constant)]))
    for child in ast.iter_child_nodes(node):
        hits += _imports(child, package)
    return hits


def violations(package: Path) -> list[str]:
    """Imports that the table does not allow, as lines for people."""
    return [
        f"{where}: {home} may not import {other}"
        for home, other, where in sorted(edges(package))
        if home != EVERY_ROOM and other not in ALLOWED.get(home, "").split()
    ]


def test_rooms_import_along_the_table_only() -> None:
    assert not violations(PACKAGE), "\n".join(violations(PACKAGE))


def test_every_file_belongs_to_a_room() -> None:
    strays = [place(file) for file in files() if room(file) not in ALLOWED | {EVERY_ROOM: ""}]
    assert not strays, f"not a room of docs/design.md 1.3: {strays}"


def test_the_table_is_the_one_of_the_design_page() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.split("### 1.3")[1].split("Engine processes start")[0]
    page: dict[str, set[str]] = {}
    for left, right in re.findall(r"^\| *\d+ *\| *([^|]+?) *\| *([^|]+?) *\|$", section, flags=re.MULTILINE):
        for name in left.replace("`", "").split(", "):
            page[name] = set() if right == "-" else set(right.split(", "))
    assert page.pop(EVERY_ROOM) == {"every room"}
    assert page == {name: set(rooms.split()) for name, rooms in ALLOWED.items() if name != "__init__"}


def test_the_table_has_no_circle() -> None:
    left = {name: set(rooms.split()) for name, rooms in ALLOWED.items()}
    while left:
        free = {name for name, rooms in left.items() if not rooms & left.keys()}
        assert free, f"these rooms import each other in a circle: {sorted(left)}"
        left = {name: rooms for name, rooms in left.items() if name not in free}


@pytest.mark.parametrize(
    ("text", "is_caught"),
    [
        ("from baltoro.engine import loop", True),
        ("from baltoro import engine", True),
        ("import baltoro.engine.loop", True),
        ("def f():\n    from baltoro.engine.loop import run", True),
        ("from importlib import import_module\nimport_module('baltoro.engine.loop')", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from baltoro.engine import loop", False),
        ("from baltoro.kernels.spans import Spans", False),
        ("from baltoro.model.config import K3Config", False),
    ],
)
def test_a_forbidden_import_is_seen_in_every_spelling(tmp_path: Path, text: str, is_caught: bool) -> None:
    file = tmp_path / "baltoro" / "model" / "layer.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert bool(violations(tmp_path / "baltoro")) == is_caught
