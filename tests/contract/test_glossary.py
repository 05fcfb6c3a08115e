"""Words that docs/glossary.md tells us not to say are not among the names that the package defines.

Only the third column's words in `code type` are looked for; names that come from other libraries are not ours.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.tree import ROOT, Function, files, parse, place, room

GLOSSARY = ROOT / "docs" / "glossary.md"
# names that the outside world chose: "name" -> who
FOREIGN: dict[str, str] = {}


@dataclass(frozen=True)
class Ban:
    """A word, as the parts of a name, and the rooms where it may stand."""

    parts: tuple[str, ...]
    rooms: frozenset[str] = frozenset()


def bans(text: str) -> list[Ban]:
    """The banned words of the page's three-column tables."""
    found = []
    for line in text.splitlines():
        columns = [column.strip() for column in line.strip().strip("|").split("|")]
        if not line.startswith("| ") or len(columns) != 3:
            continue
        for word, rooms in re.findall(r"`(\w+)`(?: \(outside ([\w, ]+)\))?", columns[2]):
            found.append(Ban(name_parts(word), frozenset(rooms.split(", ")) if rooms else frozenset()))
    return found


def name_parts(name: str) -> tuple[str, ...]:
    """snake_case and CamelCase in lower-case pieces."""
    return tuple(part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name))


def defined_names(file: Path) -> Iterator[tuple[str, ast.AST]]:
    """Names that a file gives: functions, classes, parameters, variables, attributes."""
    for node in ast.walk(parse(file)):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node


def is_said(ban: Ban, name: str) -> bool:
    """A single word counts anywhere in a name, several words only where the name ends: `is_prefill`, but not
    `is_prefill_fresh`, which asks something else."""
    parts = name_parts(name)
    return ban.parts[0] in parts if len(ban.parts) == 1 else parts[-len(ban.parts) :] == ban.parts


def said(file: Path, home: str, banned: list[Ban]) -> list[str]:
    """Places of a file of room `home` that use a banned word."""
    return [
        f"{place(file, node)}: {name}"
        for name, node in defined_names(file)
        if name not in FOREIGN and any(is_said(ban, name) and home not in ban.rooms for ban in banned)
    ]


def test_package_uses_the_words_of_the_glossary() -> None:
    banned = bans(GLOSSARY.read_text(encoding="utf-8"))
    hits = [hit for file in files() for hit in said(file, room(file), banned)]
    assert not hits, f"docs/glossary.md has another word for it: {hits}"


def test_file_names_use_the_words_of_the_glossary() -> None:
    banned = bans(GLOSSARY.read_text(encoding="utf-8"))
    hits = [place(file) for file in files() if any(is_said(b, file.stem) and room(file) not in b.rooms for b in banned)]
    assert not hits, f"docs/glossary.md has another word for it: {hits}"


def test_the_page_defines_each_word_once_and_bans_none_of_its_own() -> None:
    text = GLOSSARY.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+?) \| [^|]+ \|[^|]*\|$", text, flags=re.MULTILINE)
    words = [word for row in rows if row not in ("word", "---") for word in re.split(r", | / ", row)]
    assert len(words) > 60
    assert len(words) == len(set(words)), f"twice: {sorted(w for w in set(words) if words.count(w) > 1)}"
    everywhere = {"_".join(ban.parts) for ban in bans(text) if not ban.rooms}
    assert not everywhere & set(words)


@pytest.mark.parametrize(
    ("text", "home", "count"),
    [
        ("max_seq_len = 1", "engine", 1),
        ("def add(req: int) -> None: ...", "engine", 1),
        ("class HashBlock: ...", "cache", 1),
        ("hash_block_map = {}", "cache", 0),
        ("from collections.abc import Sequence\nx: Sequence[int] = ()", "engine", 0),
        ("session = 1", "router", 0),
        ("session = 1", "server", 1),
        ("required = frequency = 1", "engine", 0),
    ],
)
def test_a_banned_word_is_found(tmp_path: Path, text: str, home: str, count: int) -> None:
    file = tmp_path / "sample.py"
    file.write_text(text)
    banned = [Ban(("seq",)), Ban(("req",)), Ban(("hash", "block")), Ban(("session",), frozenset({"router"}))]
    assert len(said(file, home, banned)) == count
