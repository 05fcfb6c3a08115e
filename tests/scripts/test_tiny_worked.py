"""Worked sums: every line is true, and the last one is the answer."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from scripts.data.tiny import worked

NUMBER = st.integers(min_value=0, max_value=9999)


def is_true(line: str) -> bool:
    """Do the equations of a line hold? "5 - 8: borrow, 15 - 8 = 7" has one, "2 x 6 = 12, 12 + 4 = 16" two."""
    found = re.findall(r"([-\d][-+x \d()]*) = (-?\(?[-+ x\d]+\)?)", line.split(": ", 1)[-1].replace("borrow, ", ""))
    return all(_value(left) == _value(right) for left, right in found)


def _value(text: str) -> int:
    return int(eval(re.sub(r"\b0+(?=\d)", "", text.replace("x", "*"))))  # only digits and signs come here


@given(NUMBER, NUMBER)
def test_sums_and_differences_are_worked_out_truly(a: int, b: int) -> None:
    for op, result in (("+", a + b), ("-", a - b)):
        lines = worked.work(a, op, b)
        assert lines[-1] == f"{a} {op} {b} = {result}"
        assert all(is_true(line) for line in lines), lines


@given(st.integers(-999, 999), NUMBER)
def test_negative_starts_end_with_the_right_line(a: int, b: int) -> None:
    assert worked.work(a, "+", b)[-1] == f"{a} + {b} = {a + b}"
    assert worked.work(a, "-", b)[-1] == f"{a} - {b} = {a - b}"


@given(st.integers(0, 999), st.integers(0, 99))
def test_products_are_worked_out_truly(a: int, b: int) -> None:
    lines = worked.multiply_lines(a, b)
    assert lines[-1] == f"{a} x {b} = {a * b}"
    assert all(is_true(line) for line in lines), lines


@given(st.integers(10, 99), st.integers(10, 99), st.sampled_from("+-x"))
def test_more_effort_thinks_longer(a: int, b: int, op: str) -> None:
    thoughts = worked.thoughts(a, op, b)
    assert len(thoughts["low"]) < len(thoughts["high"]) < len(thoughts["max"])


def test_the_digits_of_the_columns_are_those_of_the_result() -> None:
    for a, b in ((27, 48), (99, 5), (505, 505)):
        written = []
        for line in worked.add_columns(a, b):
            found = re.search(r"write (\d)", line) or re.search(r"(\d)$", line)
            written.append(found[1] if found else "")
        assert "".join(reversed(written)) == str(a + b)
