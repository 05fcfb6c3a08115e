"""The pages of public faults have a row for every fault of their spec, and the tests they name exist.

docs/ideas/public-faults.md: serving.md G.1 to G.3. docs/ideas/public-faults-training.md: training.md B.2.
"""

from __future__ import annotations

import ast
import re

from tests.contract.tree import ROOT, functions, parse

TABLE = ROOT / "docs" / "ideas" / "public-faults.md"
SPEC = ROOT / "docs" / "spec" / "serving.md"
SECTIONS = ("## G.1", "## G.2", "## G.3")
TRAINING_TABLE = ROOT / "docs" / "ideas" / "public-faults-training.md"
TRAINING_SPEC = ROOT / "docs" / "spec" / "training.md"


def faults_of(spec: str) -> list[str]:
    """Numbers of the reports in the sections that are about what is built."""
    parts = re.split(r"^(?=## )", spec, flags=re.MULTILINE)
    return [n for part in parts if part.startswith(SECTIONS) for n in re.findall(r"^(G-\d+) ", part, re.MULTILINE)]


def rows_of(page: str) -> dict[str, str]:
    """Number -> last column."""
    found = re.findall(r"^\| ([GB]-\d+|[\w-]+#[^|]*\d) \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
    assert len(found) == len(dict(found)), "a fault has two rows"
    return dict(found)


def named_tests(cell: str) -> list[tuple[str, str]]:
    """(file, name) of each test in a cell."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)


def complaint(fault: str, cell: str) -> str | None:
    """What is wrong with a row; None if nothing is."""
    if not named_tests(cell) and not re.search(r"\bwaits? for\b", cell):
        return f"{fault} has neither a test nor a reason"
    for file, name in named_tests(cell):
        path = ROOT / file
        found = dict(functions(parse(path))) if path.exists() else {}
        if name not in found:
            return f"{fault}: {file} has no {name}"
        text = ast.get_docstring(found[name]) or ""
        keys = fault.split(", ")
        if path.stem.startswith("test_public_faults") and not any(key in text for key in keys):
            return f"{fault}: {name} does not say that it is about it"
    return None


def test_every_fault_has_a_row_and_no_row_is_made_up() -> None:
    faults = faults_of(SPEC.read_text(encoding="utf-8"))
    assert len(faults) > 30
    assert sorted(rows_of(TABLE.read_text(encoding="utf-8"))) == sorted(faults)


def test_every_row_has_a_test_that_exists_or_a_reason() -> None:
    rows = rows_of(TABLE.read_text(encoding="utf-8"))
    wrong = [found for fault, cell in rows.items() if (found := complaint(fault, cell))]
    assert not wrong, "\n".join(wrong)


def training_faults_of(spec: str) -> tuple[list[str], list[str]]:
    """(numbered reports as B-01, numbers of the issues in the list behind them)."""
    section = spec.split("### B.2")[1].split("### B.3")[0]
    numbered, further = section.split("Also worth a test each:")
    return [f"B-{int(n):02d}" for n in re.findall(r"^(\d+)\. \*\*", numbered, re.MULTILINE)], re.findall(
        r"#\d+", further
    )


def test_every_fault_of_training_has_a_row_with_a_test_or_a_reason() -> None:
    numbered, further = training_faults_of(TRAINING_SPEC.read_text(encoding="utf-8"))
    assert len(numbered) == 25 and len(further) > 15
    page = TRAINING_TABLE.read_text(encoding="utf-8")
    rows = rows_of(page)
    assert sorted(fault for fault in rows if fault.startswith("B-")) == numbered
    assert sorted(re.findall(r"#\d+", " ".join(rows))) == sorted(further)
    assert len(rows) == sum(line.startswith("| ") for line in page.splitlines()) - 2, "a row that is not understood"
    wrong = [found for fault, cell in rows.items() if (found := complaint(fault, cell))]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_row_is_found() -> None:
    """Itself standing in as a test about G-01."""
    assert complaint("G-01", "waits for drafting") is None
    assert complaint("G-01", "nothing") == "G-01 has neither a test nor a reason"
    here = "`tests/contract/test_public_faults_table.py::"
    assert complaint("G-01", f"{here}test_a_wrong_row_is_found`") is None
    assert "has no" in str(complaint("G-01", f"{here}test_that_is_not_there`"))
    assert faults_of("## G.1 A\nG-01 x\n## G.4 B\nG-56 y\n") == ["G-01"]
