"""These tests run Triton's kernels on a CPU: `scripts/test-interp`. Elsewhere they are skipped, with the reason.

--quick    of every test function the first and the last case alone, as CI runs them; nightly runs have them all
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from baltoro.config import environment

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="of every test the first and the last case alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    if find_spec("triton") is None or environment("TRITON_INTERPRET") != "1":
        skip = pytest.mark.skip(reason="needs triton and TRITON_INTERPRET=1: scripts/test-interp")
        for item in mine:
            item.add_marker(skip)
    elif config.getoption("--quick"):
        kept = set(quick(mine))
        config.hook.pytest_deselected(items=[item for item in mine if item not in kept])
        items[:] = [item for item in items if item in kept or item not in mine]


def quick(items: list[pytest.Item]) -> list[pytest.Item]:
    """The first and the last of each function."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [case for found in cases.values() for case in dict.fromkeys((found[0], found[-1]))]
