"""Files of 60 to 300 lines, functions that fit one screen; the exceptions are written down here with their reason.

A file of more than 400 lines says in its docstring why ("reason: ..."), 600 fails (kernels: 800).
A function of more than 60 lines is named in LONG_FUNCTIONS, 100 fails. Lines count from `def` to the end, without the
docstring: what has to be followed, not what explains it.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.contract.tree import PACKAGE, ROOT, Function, files, functions, parse, place, room

FILE_NEEDS_REASON, FILE_LIMIT, KERNEL_FILE_LIMIT = 400, 600, 800
FUNCTION_NEEDS_REASON, FUNCTION_LIMIT = 60, 100
# the loops of the house fit one screen
LOOPS = ("engine/loop.py", "trainer/step.py", "rl/loop.py", "router/proxy.py")

# "file:function" -> why it is better whole
LONG_FUNCTIONS: dict[str, str] = {
    "baltoro/kernels/kda/gluon_prepare.py:column_kernel": "tiles, and what is in registers between them, in one scope",
    "baltoro/kernels/moe/gluon_ring.py:tile_of": "buffers, barriers and the running sums live in one scope",
    "baltoro/kernels/mla/bulk_decode.py:bulk_split_kernel": "buffers, barriers and the running sums live in one scope",
}


def all_files() -> list[Path]:
    return files() + files(ROOT / "tests") + files(ROOT / "scripts")


def num_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def body_lines(function: Function) -> int:
    """Lines of a function without decorators and docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def long_functions(limit: int) -> dict[str, int]:
    """ "file:function" -> lines, of every function longer than `limit`."""
    found = {}
    for file in all_files():
        for name, function in functions(parse(file)):
            if body_lines(function) > limit:
                found[f"{place(file)}:{name}"] = body_lines(function)
    return found


def test_no_file_is_over_the_limit() -> None:
    def limit(file: Path) -> int:
        return KERNEL_FILE_LIMIT if PACKAGE in file.parents and room(file) == "kernels" else FILE_LIMIT

    too_long = {place(file): num_lines(file) for file in all_files() if num_lines(file) > limit(file)}
    assert not too_long, f"split these files: {too_long}"


def test_a_long_file_gives_its_reason() -> None:
    silent = {
        place(file): num_lines(file)
        for file in all_files()
        if num_lines(file) > FILE_NEEDS_REASON and "reason:" not in (ast.get_docstring(parse(file)) or "").lower()
    }
    assert not silent, f"over {FILE_NEEDS_REASON} lines without 'Reason: ...' in the module docstring: {silent}"


def test_no_function_is_over_the_limit() -> None:
    too_long = long_functions(FUNCTION_LIMIT)
    assert not too_long, f"split these functions: {too_long}"


def test_a_long_function_has_its_reason_here() -> None:
    found = long_functions(FUNCTION_NEEDS_REASON)
    assert not found.keys() - LONG_FUNCTIONS.keys(), f"over {FUNCTION_NEEDS_REASON} lines: {found}"
    assert not LONG_FUNCTIONS.keys() - found.keys(), "these are short by now: take them off the list"


def test_the_loops_of_the_house_fit_one_screen() -> None:
    for name in LOOPS:
        file = PACKAGE / name
        if file.exists():
            assert num_lines(file) <= 300, f"{name} has {num_lines(file)} lines"
