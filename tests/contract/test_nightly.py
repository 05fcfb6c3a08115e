"""bench/results/nightly.json is there, green, and knows every test that is marked `nightly`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.contract.tree import NIGHTLY, ROOT

RESULT = ROOT / "bench" / "results" / "nightly.json"
ADVICE = "run scripts/nightly on a clean tree and commit bench/results/nightly.json"


def complaints(result: dict[str, Any], names: list[str]) -> list[str]:
    """What is wrong with a nightly result, in words; empty if nothing is."""
    found = []
    tests: dict[str, dict[str, Any]] = result.get("tests", {})
    if not re.fullmatch(r"[0-9a-f]{40}", str(result.get("commit"))):
        found.append("it names no commit")
    if not isinstance(result.get("seconds"), int | float) or not isinstance(result.get("counts"), dict):
        found.append("it lacks seconds or counts")
    found += [f"{name} is {entry['outcome']}" for name, entry in tests.items() if entry["outcome"] == "failed"]
    found += [f"{name} could not be collected" for name in result.get("broken", [])]
    found += [f"{name} was skipped without a reason" for name, e in tests.items() if _is_silent_skip(e)]
    found += [f"{name} was not run" for name in names if name not in tests]
    return found


def _is_silent_skip(entry: dict[str, Any]) -> bool:
    return entry["outcome"] == "skipped" and not entry.get("reason")


def test_the_last_nightly_run_is_green_and_complete(request: pytest.FixtureRequest) -> None:
    """As far as this run has collected the tests: all of them, where none is chosen."""
    assert RESULT.exists(), f"bench/results/nightly.json is missing: {ADVICE}"
    found = complaints(json.loads(RESULT.read_text(encoding="utf-8")), request.config.stash[NIGHTLY])
    assert not found, "\n".join([ADVICE, *found])


def test_every_kind_of_gap_is_reported() -> None:
    good = {"commit": "a" * 40, "seconds": 1.5, "counts": {"passed": 1}, "tests": {"t::a": {"outcome": "passed"}}}
    assert complaints(good, ["t::a"]) == []
    assert complaints(good, ["t::a", "t::b"]) == ["t::b was not run"]
    assert complaints(good | {"tests": {"t::a": {"outcome": "failed"}}}, []) == ["t::a is failed"]
    assert complaints(good | {"tests": {"t::a": {"outcome": "skipped"}}}, []) == ["t::a was skipped without a reason"]
    assert complaints(good | {"broken": ["t.py"]}, []) == ["t.py could not be collected"]
    assert complaints(good | {"commit": "main"}, []) == ["it names no commit"]
    assert complaints({name: value for name, value in good.items() if name != "seconds"}, []) != []
