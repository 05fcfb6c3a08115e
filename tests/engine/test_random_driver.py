"""Many lives of an engine under random operations (`driver.py`); `test_random_operations.py` makes small what fails."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.engine.driver import live

# what has to have happened (but for a disk, which answers when it likes)
EVENTS = (
    "cache_hit_tokens",
    "cache_superseded",
    "cache_evicted_states",
    "host_loaded_tokens",
    "num_backups",
    "num_moves",
    "num_retracted_reqs",
    "num_skipped_snapshots",
    "abort in flight",
    "queue full",
    "forks",
    "scored",
    "flush",
    "states checked",
)


@pytest.mark.slow
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.nightly) for block in (1, 2, 3))])
def test_ten_thousand_operations(block: int, tmp_path: Path) -> None:
    """In four parts, three of them nightly."""
    seen: Counter[str] = Counter()
    for seed in range(25 * block, 25 * block + 25):
        seen += live(seed, 100, tmp_path / str(seed))
    assert seen["operations"] == 2500
    missing = [event for event in EVENTS if not seen[event]]
    assert not missing, f"{missing} never happened: {seen}"


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(10))
def test_a_hundred_thousand_operations(block: int, tmp_path: Path) -> None:
    for seed in range(100):
        live(1000 + 100 * block + seed, 100, tmp_path / str(seed))
