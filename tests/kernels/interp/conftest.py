"""These tests run Triton's kernels on a CPU: `scripts/test-interp`. Elsewhere they are skipped, with the reason."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from baltoro.config import environment

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("triton") is not None and environment("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="needs triton and TRITON_INTERPRET=1: scripts/test-interp")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)
