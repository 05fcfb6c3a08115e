"""The disk tier: nothing found too early, lost or mixed while jobs are slow; bounds; restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baltoro.cache.disk import DiskTier
from baltoro.cache.disk_files import SUFFIX, DiskFiles, file_bytes
from baltoro.cache.tier import Landed
from baltoro.errors import InvariantError
from tests.cache.disk_fakes import CHAIN, NUM_CHAINS, WAIT_S, SlowFiles, make_record, wait_for


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[SlowFiles, DiskTier]]:
    files = SlowFiles(tmp_path)
    tier = DiskTier(files, 10_000)
    yield files, tier
    files.gate.release(100)
    tier.close()


def test_a_record_is_not_found_before_its_file_is_whole(slow: tuple[SlowFiles, DiskTier]) -> None:
    files, tier = slow
    record = make_record(1)
    assert tier.put_later(record)
    assert files.started.get(timeout=WAIT_S) == "write"
    assert tier.lookup(record.digest) is None and not tier.prefetch(record.digest) and tier.landed() == []
    files.gate.release()
    assert wait_for(tier, 1) == [Landed("put", record.digest, True)]
    assert tier.lookup(record.digest) is not None


def test_an_eviction_while_a_record_is_being_read_loses_nothing(slow: tuple[SlowFiles, DiskTier]) -> None:
    files, tier = slow
    files.gate.release(3)
    record = make_record(1)
    assert tier.put(record)
    assert tier.prefetch(record.digest) and tier.prefetch(record.digest), "asked twice, read once"
    assert wait_for(tier, 2)[1].record == record
    assert [files.started.get(timeout=WAIT_S) for _ in range(2)] == ["write", "read"]
    assert tier.get(record.digest) == record
    assert files.started.get(timeout=WAIT_S) == "read"
    assert tier.prefetch(record.digest)
    assert files.started.get(timeout=WAIT_S) == "read"
    assert tier.drop(record.digest)
    assert tier.put_later(record), "and it comes again"
    assert tier.lookup(record.digest) is None
    files.gate.release(3)
    first, second = wait_for(tier, 2)
    assert first == Landed("get", record.digest, True, record)
    assert second == Landed("put", record.digest, True)
    files.gate.release()
    assert tier.get(record.digest) == record


def test_the_queue_is_bounded_and_says_no(tmp_path: Path) -> None:
    files = SlowFiles(tmp_path)
    size = file_bytes(make_record(1))
    tier = DiskTier(files, 100 * size, max_pending_bytes=2 * size)
    assert [tier.put_later(make_record(name)) for name in (1, 2, 3, 5)] == [True, True, False, False]
    assert tier.stats().num_pending_bytes == 2 * size and tier.stats().num_refused_total == 2
    files.gate.release(2)
    wait_for(tier, 2)
    assert tier.put_later(make_record(3)), "the queue has room again"
    files.gate.release(100)
    tier.close()


def test_one_record_of_any_size_may_go(tmp_path: Path) -> None:
    tier = DiskTier(DiskFiles(tmp_path, b"model"), 100_000, max_pending_bytes=10)
    record = make_record(1)
    assert tier.put(record) and tier.get(record.digest) == record
    tier.close()


def test_what_was_written_is_there_after_a_restart_in_the_order_of_use(tmp_path: Path) -> None:
    records = [make_record(name, has_state=name % 8 == 0) for name in (0, 4, 8)]  # three first blocks
    size = file_bytes(records[0])
    tier = DiskTier.open(tmp_path, 10 * size, b"model")
    assert all(tier.put(record) for record in records)
    assert tier.get(records[0].digest) == records[0]
    tier.close()
    tier = DiskTier.open(tmp_path, 2 * size, b"model")
    assert [tier.lookup(record.digest) is not None for record in records] == [True, False, True]
    assert [tier.get(record.digest) for record in records] == [records[0], None, records[2]]
    assert len(list(tmp_path.glob("*" + SUFFIX))) == 2
    tier.close()


def test_of_a_chain_the_end_goes_first(tmp_path: Path) -> None:
    chain = [make_record(name) for name in range(CHAIN)]
    tier = DiskTier.open(tmp_path, CHAIN * file_bytes(chain[1]), b"model")
    assert all(tier.put(record) for record in chain)
    assert tier.put(make_record(CHAIN))
    assert [tier.lookup(record.digest) is not None for record in chain] == [True, True, True, False]
    tier.close()


def test_a_state_that_comes_later_replaces_the_block_alone_but_not_the_other_way(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, 10_000, b"model")
    bare, whole = make_record(1, has_state=False), make_record(1)
    for record in (bare, whole, bare):
        assert tier.put(record)
    assert tier.get(whole.digest) == whole
    assert tier.stats().num_bytes == file_bytes(whole)
    assert tier.stats().num_written_total == 2
    tier.close()


def test_a_lost_file_does_not_take_its_successor_along(slow: tuple[SlowFiles, DiskTier]) -> None:
    files, tier = slow
    files.gate.release()
    record = make_record(1)
    assert tier.put(record)
    (files.directory / (record.digest.hex() + SUFFIX)).unlink()
    assert tier.prefetch(record.digest) and tier.drop(record.digest) and tier.put_later(record)
    files.gate.release()  # the read finds nothing, while the new write is queued
    put, got = wait_for(tier, 2)
    assert put.kind == "put" and got == Landed("get", record.digest, False)
    files.gate.release(3)
    assert wait_for(tier, 1) == [Landed("put", record.digest, True)]
    assert tier.get(record.digest) == record


def test_close_finishes_what_is_queued(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, 100_000, b"model")
    records = [make_record(name) for name in range(NUM_CHAINS * CHAIN)]
    assert all(tier.put_later(record) for record in records)
    tier.close()
    tier.close()
    with pytest.raises(InvariantError, match="after close"):
        tier.put_later(make_record(99))
    tier = DiskTier.open(tmp_path, 100_000, b"model")
    assert [tier.get(record.digest) for record in records] == records
    assert tier.clear() == len(records)
    tier.close()
    assert not list(tmp_path.glob("*" + SUFFIX))
