"""Many lives of an engine under random operations (`driver.py`); `test_random_operations.py` makes small what fails."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.engine.driver import live

# what has to have happened, and how often at least; a disk answers when it likes
EVENTS = {
    "cache_hit_tokens": 10,
    "cache_superseded": 10,
    "cache_evicted_states": 10,
    "host_loaded_tokens": 10,
    "num_backups": 10,
    "num_moves": 10,
    "num_retracted_reqs": 10,
    "num_skipped_snapshots": 10,
    "disk_read_total": 1,
    "abort in flight": 10,
    "queue full": 10,
    "forks": 10,
    "scored": 10,
    "flush": 10,
    "states checked": 10,
}


@pytest.mark.slow
def test_ten_thousand_operations(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        seen += live(seed, 100, tmp_path / str(seed))
    assert seen["operations"] == 10_000
    for event, least in EVENTS.items():
        assert seen[event] >= least, f"{event} hardly happened: {seen}"


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(10))
def test_a_hundred_thousand_operations(block: int, tmp_path: Path) -> None:
    for seed in range(100):
        live(1000 + 100 * block + seed, 100, tmp_path / str(seed))
