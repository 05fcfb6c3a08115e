"""Judging answers: strict in value and type; intervals that hold at the edges."""

from __future__ import annotations

from typing import Any

import pytest

from baltoro.bench.scoring import f1, is_right, same, wilson
from baltoro.errors import ConfigError


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*wanted: tuple[str, str]) -> dict[str, Any]:
    made = [{"id": "x", "function": {"name": name, "arguments": arguments}} for name, arguments in wanted]
    return {"role": "assistant", "content": None, "tool_calls": made}


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("27 + 48 = 75.", 75, True),
        ("75", 75, True),
        ("The answer is 1,075 apples.", 1075, True),
        ("27 - 48 = -21.", -21, True),
        ("27 - 48 = 21.", -21, False),
        ("no idea", 75, False),
        ("", 75, False),
        ("0.3125", 0.3125, True),
        ("0.3126", 0.3125, True),
        ("0.313", 0.3125, False),
    ],
)
def test_the_last_number_counts(text: str, gold: float, right: bool) -> None:
    assert is_right(says(text), {"kind": "number", "gold": gold}) is right


def test_exact_allows_white_space_and_a_full_stop_alone() -> None:
    check = {"kind": "exact", "gold": "nus"}
    assert is_right(says(" nus.\n"), check) and is_right(says("nus"), check)
    assert not is_right(says("The answer is nus"), check) and not is_right({"content": None}, check)
    assert is_right(says("Done."), {"kind": "exact", "gold": "Done."})


def test_has_needs_a_whole_word() -> None:
    check = {"kind": "has", "gold": ["canine", "domestic animal"]}
    assert is_right(says("A dog is a kind of domestic animal."), check)
    assert not is_right(says("canines"), check)


def test_one_of_and_overlap() -> None:
    assert is_right(says("Help."), {"kind": "one_of", "gold": ["help", "aid"]})
    assert not is_right(says("to help"), {"kind": "one_of", "gold": ["help", "aid"]})
    check = {"kind": "overlap", "gold": ["a large natural stream of water"]}
    assert is_right(says("river: a large stream of water."), check)
    assert not is_right(says("river: a small animal."), check)
    assert f1("a b", "c") == 0 and f1("a b", "b a") == 1


def test_calls_compare_names_values_and_types() -> None:
    check = {"kind": "calls", "gold": [{"name": "add", "arguments": {"a": 1, "b": 2.5}}]}
    assert is_right(calls(("add", '{"b": 2.5, "a": 1}')), check)
    for wrong in ('{"a": "1", "b": 2.5}', '{"a": true, "b": 2.5}', '{"a": 1}', '{"a": 1, "b": 2.5, "c": 0}', "{"):
        assert not is_right(calls(("add", wrong)), check)
    assert not is_right(calls(("sum", '{"a": 1, "b": 2.5}')), check)
    assert not is_right(says("3.5"), check)


def test_no_call_is_right_where_none_is_wanted() -> None:
    check = {"kind": "calls", "gold": []}
    assert is_right(says("Hello!"), check) and not is_right(calls(("add", "{}")), check)


def test_json_is_compared_as_a_value() -> None:
    check = {"kind": "json", "gold": {"age": 7, "tags": ["a", "b"], "is_new": True}}
    assert is_right(says('{"tags": ["a", "b"], "age": 7, "is_new": true}'), check)
    assert not is_right(says('{"tags": ["b", "a"], "age": 7, "is_new": true}'), check)
    assert not is_right(says('```{"age": 7}```'), check)


def test_same_keeps_integers_apart_from_floats_and_booleans() -> None:
    assert same(21, 21.0) and same(2.5, 2.5) and same(None, None)
    assert not same(21.0, 21) and not same(True, 1) and not same(1, True) and not same("1", 1)


def test_wilson_interval_holds_at_the_edges() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(0, 50)
    assert low == 0 and 0 < high < 0.1
    low, high = wilson(50, 50)
    assert 0.9 < low < 1 and high == 1
    low, high = wilson(190, 200)
    assert low == pytest.approx(0.910, abs=0.002) and high == pytest.approx(0.973, abs=0.002)


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ConfigError, match="number"):
        is_right(says("1"), {"kind": "magic", "gold": 1})
