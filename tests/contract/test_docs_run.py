"""The docs are right: marked snippets run, Python blocks compile, commands parse, links and paths lead somewhere.

A fenced block whose info string goes on with `run` (```python run, ```console run) is executed from the root; in a
console block the lines that call baltoro are. Commands are compared with the options of the real command line.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest
import typer.main

from baltoro.cli import VERBS, app
from tests.contract.tree import ROOT, place

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md")]
PAGES = [page for page in PAGES if page.exists()] + sorted((ROOT / "docs").rglob("*.md"))
# pages about what is there, not about what is to come: every path that they name exists
PRESENT = [page for page in PAGES if page.name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "tour.md")]
SHELLS = ("console", "bash", "sh", "shell")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    where: str
    language: str
    marks: tuple[str, ...]
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^```([^\n`]*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        language, *marks = match[1].split() or [""]
        line = text[: match.start()].count("\n") + 1
        found.append(Block(f"{place(page)}:{line}", language, tuple(marks), match[2]))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in ALL if block.language == "python"]
RUN = [block for block in ALL if "run" in block.marks]


def shell_commands(text: str) -> Iterator[list[str]]:
    """Words of each call of baltoro, without the program itself; continued lines joined, comments dropped."""
    for line in text.replace("\\\n", " ").splitlines():
        if "baltoro " not in line:
            continue  # anything else may be quoted as it likes
        for part in re.split(r"&&|;|\|(?!\s*-)", line.strip().removeprefix("$ ")):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            if words[:1] == ["baltoro"]:
                yield words[1:]
            elif len(words) > 2 and words[0].startswith("python") and words[1:3] == ["-m", "baltoro"]:
                yield words[3:]


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(place, words) of every command line of ours on a page, in shell blocks and in code spans."""
    for block in blocks(page):
        if block.language in SHELLS:
            for words in shell_commands(block.text):
                yield block.where, words
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`((?:python3? -m )?baltoro [^`\n]+)`", prose):
        # options of a synopsis stand in brackets, alternatives between bars
        plain = re.sub(r"[\[\]|]|\.\.\.", " ", span)
        for words in shell_commands(plain):
            yield place(page), words


@cache
def verb(name: str) -> click.Command | None:
    """The real sub-command."""
    group = typer.main.get_command(app)
    assert hasattr(group, "get_command")
    found: click.Command | None = group.get_command(click.Context(group), name)
    return found


def complaint(words: list[str]) -> str | None:
    """Why a command line would be refused, or None. Values are not looked at: pages use stand-ins for them."""
    if not words or words[0].startswith("-"):
        return None
    command = verb(words[0])
    if command is None:
        return f"there is no verb {words[0]}"
    if (
        hasattr(command, "get_command") and len(words) > 1 and not words[1].startswith("-")
    ):  # a verb with verbs of its own
        command, words = command.get_command(click.Context(command), words[1]), words[1:]
        if command is None:
            return f"there is no verb {words[0]}"
    known = {option: item for item in command.params for option in (*item.opts, *item.secondary_opts)}
    room = sum(item.nargs if item.nargs > 0 else 99 for item in command.params if item.param_type_name == "argument")
    rest = words[1:]
    while rest:
        word, *rest = rest
        if not word.startswith("-") or word == "-":
            room -= 1
            continue
        option, sign, _ = word.partition("=")
        if option in ("--help", "-h"):
            continue
        if option not in known:
            return f"{words[0]} has no option {option}"
        if not sign and not getattr(known[option], "is_flag", False):
            rest = rest[known[option].nargs :]
    return None if room >= 0 else f"{words[0]} takes fewer arguments than {words[1:]}"


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.where)
def test_python_block_compiles(block: Block) -> None:
    compile(block.text, block.where, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=lambda block: block.where)
def test_marked_block_runs(block: Block) -> None:
    if block.language == "python":
        calls = [[sys.executable, "-c", block.text]]
    else:
        assert block.language in SHELLS, f"{block.where}: only python and {', '.join(SHELLS)} blocks can be run"
        calls = [[sys.executable, "-m", "baltoro", *words] for words in shell_commands(block.text)]
    assert calls, f"{block.where} is marked to run and calls nothing"
    for call in calls:
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{block.where}: {call}\n{done.stdout}\n{done.stderr}"


def test_every_command_line_of_the_docs_parses() -> None:
    found = [(where, words, complaint(words)) for page in PAGES for where, words in commands(page)]
    assert found, "the docs name no command at all"
    wrong = [f"{where}: baltoro {' '.join(words)}: {why}" for where, words, why in found if why]
    assert not wrong, "\n".join(wrong)


def test_examples_in_the_help_of_every_verb_parse() -> None:
    wrong = []
    for name in VERBS:
        command = verb(name)
        for words in shell_commands(command.help or "") if command else ():
            if complaint(words):
                wrong.append(f"baltoro {name} --help: baltoro {' '.join(words)}: {complaint(words)}")
    assert not wrong, "\n".join(wrong)


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path = target.partition("#")[0]
            if path and "://" not in path and not (page.parent / path).exists():
                wrong.append(f"{place(page)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_paths_named_in_the_pages_about_the_present_exist() -> None:
    tops = "baltoro|tests|docs|scripts|recipes|bench|examples"
    wrong = []
    for page in PRESENT:
        for path in re.findall(rf"(?<![\w/.])((?:{tops})/[\w/.*-]*[\w/*])", page.read_text(encoding="utf-8")):
            if not any(ROOT.glob(path.rstrip("/"))):
                wrong.append(f"{place(page)}: {path}")
    assert not wrong, "\n".join(wrong)


def test_commands_are_found_in_every_form(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Use `baltoro explain --json` or `python -m baltoro convert A B [--x y | --z]`.\n"
        "```console\n$ pip install x && baltoro serve \\\n  --port 1  # why\nA=1 baltoro chat | tee log\n```\n"
    )
    assert [words for _, words in commands(page)] == [
        ["serve", "--port", "1"],
        ["chat"],
        ["explain", "--json"],
        ["convert", "A", "B", "--x", "y", "--z"],
    ]


def test_a_wrong_command_is_refused() -> None:
    assert complaint(["explain"]) is None
    assert complaint(["explain", "--no-such-option"]) == "explain has no option --no-such-option"
    assert complaint(["no-such-verb"]) == "there is no verb no-such-verb"
    assert "fewer arguments" in str(complaint(["explain", *"abcdefgh"]))
