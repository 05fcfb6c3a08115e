"""The CPython documentation of this machine, as plain text.

In: Debian's package python3.N-doc (its reStructuredText sources), or, where there is none, what every Python brings
along: the help topics of `pydoc` and the docstrings of the standard library. Out: documents, and where they came from.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also without an installed baltoro

from baltoro.trainer.corpus import Source
from scripts.data import rst

INSTALL_HINT = "apt-get install python3.11-doc"
LICENCE = "PSF-2.0"
# lists of changes; a module that is gone; what concerns C and packagers, another language than the rest
SKIPPED = {"whatsnew", "includes", "distutils", "c-api", "extending", "distributing", "install", "installing"}
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Page:
    """One page: its name decides whether it is held out."""

    name: str
    text: str


def find_docs() -> Path | None:
    """The newest installed `_sources` folder of Debian's documentation package."""
    found = [path for path in Path("/usr/share/doc").glob("python3.*/html/_sources") if path.is_dir()]
    numbered = {
        int(path.parents[1].name[8:]): path for path in found if re.fullmatch(r"python3\.\d+", path.parents[1].name)
    }
    return numbered[max(numbered)] if numbered else None


def pages(folder: Path | None) -> tuple[list[Page], Source]:
    """Pages of the documentation in `folder`; of the standard library's own help texts if it is None."""
    found = list(_from_rst(folder) if folder is not None else _from_library())
    digest = hashlib.sha256()
    for page in found:
        digest.update(page.text.encode())
    package, version = _package(folder)
    source = Source(package=package, version=version, licence=LICENCE, sha256=digest.hexdigest(), documents=len(found))
    return found, source


def _from_rst(folder: Path) -> Iterator[Page]:
    for path in sorted(folder.rglob("*.rst.txt")):
        name = path.relative_to(folder).as_posix()
        if name.split("/")[0] not in SKIPPED:
            yield Page(name, rst.plain(path.read_text(encoding="utf-8")))


def _from_library() -> Iterator[Page]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Page(f"topics/{name}", topics[name])
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_LIBRARY & set(name.parts):
            continue
        text = "\n\n".join(_docstrings(path))
        if len(text) > 200:
            yield Page(f"library/{name.as_posix()}", text)


def _docstrings(path: Path) -> Iterator[str]:
    """The module's, and every class's and function's, under its name."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # a few files are meant to be broken
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 40:
                yield f"# {path.stem if isinstance(node, ast.Module) else node.name}\n\n{text}"


def _package(folder: Path | None) -> tuple[str, str]:
    if folder is None:
        return "python (help topics and docstrings)", platform.python_version()
    name = f"{folder.parents[1].name}-doc"
    found = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", name], capture_output=True, text=True, check=False)
    return name, found.stdout.strip() or "unknown"
