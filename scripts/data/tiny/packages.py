"""Prose and code that packages bring along: Python's documentation and library, PostgreSQL's manual.

In: what is installed. Out: documents (name, text), and the package they came from. A document of these corpora may be
cut anywhere; one page in forty (by name) is held out.
"""

from __future__ import annotations

import hashlib
import html
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pydocs
import rst

from baltoro.errors import ConfigError
from baltoro.trainer.corpus import Source

POSTGRES = "postgresql-doc-15"
POSTGRES_HTML = Path("/usr/share/doc") / POSTGRES / "html"
HINT = f"apt-get install python3.11-doc {POSTGRES}"
# Tables of characters, generated parsers, and text that the documentation repeats.
NOT_CODE = {"encodings", "pydoc_data", "lib2to3", "msilib"} | pydocs.NOT_LIBRARY
LONGEST_FILE = 200_000
_BLOCKS = {"p", "div", "pre", "h1", "h2", "h3", "h4", "li", "tr", "dt", "dd", "table", "ul", "ol", "dl", "br"}
_SKIPPED = {"script", "style", "head", "title"}

Named = tuple[str, str]


def python_docs() -> tuple[list[Named], Source]:
    """Sections of Debian's Python documentation. Errors: ConfigError says what to install."""
    folder = pydocs.find_docs()
    if folder is None:
        raise ConfigError(f"Python's documentation is not installed; {HINT}")
    pages, source = pydocs.pages(folder)
    return [(page.name, section) for page in pages for section in rst.sections(page.text)], source


def library_code() -> tuple[list[Named], Source]:
    """Source files of the running Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_CODE & set(name.parts) or path.stat().st_size > LONGEST_FILE:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if "\0" not in text and len(text) > 200:
            found.append((name.as_posix(), f"# {name.as_posix()}\n{text}"))
    return found, source_of("CPython standard library", sysconfig.get_python_version(), "PSF-2.0", found)


def postgres_docs(folder: Path = POSTGRES_HTML) -> tuple[list[Named], Source]:
    """Pages of PostgreSQL's manual as text. Errors: ConfigError says what to install."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist; {HINT}")
    found = []
    for path in sorted(folder.glob("*.html")):
        text = plain_html(path.read_text(encoding="utf-8", errors="replace"))
        if len(text) > 300 and not path.name.startswith(("bookindex", "release", "features")):
            found.append((path.name, text))
    return found, source_of(POSTGRES, deb_version(POSTGRES), "PostgreSQL", found)


def source_of(package: str, version: str, licence: str, documents: Iterable[Named]) -> Source:
    """The manifest's line for what was read."""
    digest, count = hashlib.sha256(), 0
    for name, text in documents:
        digest.update(f"{name}\0{text}\0".encode())
        count += 1
    return Source(package=package, version=version, licence=licence, sha256=digest.hexdigest(), documents=count)


def deb_version(package: str) -> str:
    found = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version}", package], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


class _Text(HTMLParser):
    """Text of a page: blocks on lines of their own, `pre` as it stands. Single writer: `feed`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self._skip = 0
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = dict(attrs).get("class") or ""
        if tag in _SKIPPED or (tag == "div" and classes.startswith("nav")) or self._skip:
            self._skip += tag not in ("br", "hr", "img", "meta", "link", "input", "col")
            return
        if tag in _BLOCKS:
            self.out.append("\n# " if tag in ("h1", "h2", "h3") else "\n- " if tag == "li" else "\n")
        elif tag in ("td", "th"):
            self.out.append(" | ")
        self._pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if self._skip:
            self._skip -= 1
            return
        self._pre -= tag == "pre"
        if tag in _BLOCKS:
            self.out.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self.out.append(data if self._pre else re.sub(r"\s+", " ", data))


def plain_html(page: str) -> str:
    """HTML -> text."""
    parser = _Text()
    parser.feed(page)
    text = html.unescape("".join(parser.out)).replace("\xa0", " ")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n +(?=\S)", lambda m: m.group(0) if len(m.group(0)) > 2 else "\n", text)
    text = re.sub(r"(# [\d.A-Z]+\.) ?\n*", r"\1 ", text)
    text = re.sub(r"(?m)^- \n+", "- ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def synopses(docs: Iterable[Named]) -> Iterator[tuple[str, str]]:
    """(module, what it is for) from the headings "`name` --- What it does" of the library's pages."""
    seen = set()
    for name, text in docs:
        for module, purpose in re.findall(r"(?m)^# `?([\w.]+)`? --- (.+)$", text):
            if name.startswith("library/") and module not in seen:
                seen.add(module)
                yield module, purpose.strip().rstrip(".")


def commands(docs: Iterable[Named]) -> Iterator[tuple[str, str]]:
    """(SQL command, what it does) from "NAME — purpose" of the reference pages."""
    for name, text in docs:
        found = re.search(r"(?m)^([A-Z][A-Z ]+) — (.+)$", text)
        if name.startswith("sql-") and found:
            yield found.group(1).strip(), found.group(2).strip().rstrip(".")
