"""The disk tier: against a plain account under random operations, with slow, broken and interrupted files."""

from __future__ import annotations

import hashlib
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baltoro.cache.disk import DiskTier
from baltoro.cache.disk_files import SUFFIX, UNFINISHED, DiskFiles, file_bytes
from baltoro.cache.tier import Landed, TierEntry, TierRecord
from baltoro.errors import ConfigError, InvariantError

NUM_CHAINS, CHAIN = 3, 4
WAIT_S = 20


def make_record(name: int, *, has_state: bool = True, size: int = 40) -> TierRecord:
    """The bytes follow from the name alone, as those of a digest do."""
    digest = hashlib.blake2b(bytes([name]), digest_size=16).digest()
    parent = b"" if name % CHAIN == 0 else hashlib.blake2b(bytes([name - 1]), digest_size=16).digest()
    return TierRecord(digest, parent, name % CHAIN + 1, digest * size, digest[::-1] * 5 if has_state else None)


class MemoryFiles:
    """Files in a dictionary; counts what they take, and can be told to fail or to lose a byte."""

    def __init__(self, max_bytes: int) -> None:
        self.kept: dict[bytes, TierRecord] = {}
        self.max_bytes = max_bytes
        self.is_failing = False

    def scan(self) -> tuple[list[TierEntry], int]:
        return [], 0

    def write(self, record: TierRecord) -> None:
        if self.is_failing:
            raise OSError("no space left")
        assert record.digest not in self.kept, "what is replaced was removed before"
        self.kept[record.digest] = record
        assert sum(map(file_bytes, self.kept.values())) <= self.max_bytes

    def read(self, digest: bytes) -> TierRecord | None:
        return self.kept.get(digest)

    def remove(self, digest: bytes) -> None:
        self.kept.pop(digest, None)

    def close(self) -> None:
        pass


class SteppedTier(DiskTier):
    """Its jobs are done when the test says so, one by one, instead of by a thread."""

    def _start(self) -> None:
        pass

    def _check_alive(self) -> None:
        pass

    def step(self) -> bool:
        """Do the next job, if there is one."""
        if self._jobs.empty():
            return False
        job = self._jobs.get()
        assert job is not None
        self._done.put(self._do(job))
        return True

    def _next_done(self):  # type: ignore[no-untyped-def]
        while self._done.empty():
            assert self.step(), "the tier waits for something that nobody does"
        return self._done.get()


class DiskModel(RuleBasedStateMachine):
    """Whatever the order of jobs: the right bytes or none, within the limit, and each accepted wish gets its answer."""

    @initialize(num_records=st.integers(1, 6), num_pending=st.integers(1, 4))
    def start(self, num_records: int, num_pending: int) -> None:
        size = file_bytes(make_record(1))
        self.files = MemoryFiles(num_records * size + 10)
        self.tier = SteppedTier(self.files, self.files.max_bytes, max_pending_bytes=num_pending * size)
        self.wanted_puts: list[bytes] = []
        self.wanted_gets: set[bytes] = set()
        self.num_failed = 0

    def check(self, record: TierRecord | None) -> None:
        if record is None:
            return
        whole = next(r for r in map(make_record, range(NUM_CHAINS * CHAIN)) if r.digest == record.digest)
        assert (record.block, record.parent, record.depth) == (whole.block, whole.parent, whole.depth)
        assert record.state in (None, whole.state)

    @rule(name=st.integers(0, NUM_CHAINS * CHAIN - 1), has_state=st.booleans(), is_later=st.booleans())
    def put(self, name: int, has_state: bool, is_later: bool) -> None:
        record = make_record(name, has_state=has_state)
        num_jobs = self.tier._num_jobs
        if is_later:
            is_kept = self.tier.put_later(record)
        else:
            is_kept = self.tier.put(record)
            entry = self.tier.lookup(record.digest)
            assert is_kept == (entry is not None)
            assert entry is None or entry.has_state or not has_state
            assert is_kept or self.files.is_failing or self.tier.stats().num_refused_total
        if self.tier._num_jobs > num_jobs and (is_kept or self.files.is_failing):
            self.wanted_puts.append(record.digest)

    @rule(name=st.integers(0, NUM_CHAINS * CHAIN - 1))
    def get(self, name: int) -> None:
        digest = make_record(name).digest
        entry = self.tier.lookup(digest)
        record = self.tier.get(digest)
        self.check(record)
        assert (record is not None) == (entry is not None)
        assert record is None or entry is None or (record.state is not None) == entry.has_state

    @rule(name=st.integers(0, NUM_CHAINS * CHAIN - 1))
    def prefetch(self, name: int) -> None:
        digest = make_record(name).digest
        if self.tier.prefetch(digest):
            self.wanted_gets.add(digest)

    @rule(name=st.integers(0, NUM_CHAINS * CHAIN - 1))
    def drop(self, name: int) -> None:
        digest = make_record(name).digest
        is_there = digest in self.tier._items
        assert self.tier.drop(digest) == is_there
        assert self.tier.lookup(digest) is None

    @rule(num_jobs=st.integers(1, 5))
    def work(self, num_jobs: int) -> None:
        for _ in range(num_jobs):
            self.tier.step()

    @rule()
    def poll(self) -> None:
        for result in self.tier.landed():
            self.check(result.record)
            assert result.is_ok or self.num_failed
            if result.kind == "put":
                self.wanted_puts.remove(result.digest)
            else:
                assert result.record is not None
                self.wanted_gets.discard(result.digest)

    @rule()
    def fail_or_recover(self) -> None:
        self.files.is_failing = not self.files.is_failing
        self.num_failed += 1

    @precondition(lambda self: self.tier.stats().num_entries > 3)
    @rule()
    def clear(self) -> None:
        assert self.tier.clear() > 3
        assert self.tier.stats().num_entries == 0

    @rule()
    def come_to_rest(self) -> None:
        """All jobs done and picked up: index and files say the same, and every wish was answered."""
        while self.tier.step():
            pass
        self.poll()
        assert not self.wanted_puts and not self.wanted_gets
        stats = self.tier.stats()
        assert stats.num_pending_bytes == 0
        assert stats.num_bytes == sum(map(file_bytes, self.files.kept.values()))
        assert stats.num_entries == len(self.files.kept)
        for digest, record in self.files.kept.items():
            entry = self.tier.lookup(digest)
            assert entry is not None and entry.has_state == (record.state is not None)

    @invariant()
    def stays_within_its_limits(self) -> None:
        if not hasattr(self, "tier"):
            return
        stats = self.tier.stats()
        assert 0 <= stats.num_bytes <= stats.max_bytes
        assert stats.num_pending_bytes >= 0


TestDiskModel = DiskModel.TestCase
TestDiskModel.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


@pytest.mark.nightly
def test_disk_tier_under_many_operations() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(DiskModel, settings=settings(max_examples=2000, stateful_step_count=50, deadline=None))


class SlowFiles(DiskFiles):
    """Real files; a job starts only when the test lets it, and says when it has started."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, b"model")
        self.started: queue.Queue[str] = queue.Queue()
        self.gate = threading.Semaphore(0)

    def _pass(self, kind: str) -> None:
        self.started.put(kind)
        assert self.gate.acquire(timeout=WAIT_S)

    def write(self, record: TierRecord) -> None:
        self._pass("write")
        super().write(record)

    def read(self, digest: bytes) -> TierRecord | None:
        self._pass("read")
        return super().read(digest)

    def remove(self, digest: bytes) -> None:
        self._pass("remove")
        super().remove(digest)


def wait_for(tier: DiskTier, count: int) -> list[Landed]:
    """The next `count` results."""
    found: list[Landed] = []
    pause = threading.Event()
    for _ in range(WAIT_S * 1000):
        found += tier.landed()
        if len(found) >= count:
            return found
        pause.wait(0.001)
    raise AssertionError(f"{len(found)} of {count} results came")


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


@pytest.mark.parametrize("where", [0, 8, 24, 40, 52, 70, 90, -1])
def test_one_altered_byte_is_a_miss(tmp_path: Path, where: int) -> None:
    tier = DiskTier.open(tmp_path, 10_000, b"model")
    record = make_record(1)
    assert tier.put(record)
    (path,) = tmp_path.glob("*" + SUFFIX)
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    assert tier.get(record.digest) is None
    assert not path.exists() and tier.lookup(record.digest) is None
    assert tier.stats().num_bad_total == 1 and tier.stats().num_bytes == 0
    assert tier.put(record) and tier.get(record.digest) == record, "a lost record can come again"
    tier.close()


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("fault", ["short", "long", "empty", "other name", "fingerprint", "version"])
def test_a_file_that_is_not_right_is_a_miss(tmp_path: Path, fault: str, is_open: bool) -> None:
    """Found out when it is opened, or when it is read if it went wrong after that."""
    tier = DiskTier.open(tmp_path, 10_000, b"model")
    record, other = make_record(1), make_record(2)
    assert tier.put(record) and tier.put(other)
    if not is_open:
        tier.close()
    path = tmp_path / (record.digest.hex() + SUFFIX)
    content = path.read_bytes()
    if fault == "other name":
        content = (tmp_path / (other.digest.hex() + SUFFIX)).read_bytes()
    if fault == "fingerprint":
        strange = DiskTier.open(tmp_path / "strange", 10_000, b"model of yesterday")
        assert strange.put(record)
        strange.close()
        content = (tmp_path / "strange" / path.name).read_bytes()
    changed = {"short": content[:-1], "long": content + b"x", "empty": b"", "version": b"baltkv00" + content[8:]}
    path.write_bytes(changed.get(fault, content))
    if not is_open:
        tier = DiskTier.open(tmp_path, 10_000, b"model")
        assert tier.lookup(record.digest) is None
    assert tier.get(record.digest) is None
    assert not path.exists()
    assert tier.stats().num_bad_total == 1 and tier.stats().num_bytes == file_bytes(other)
    assert tier.get(other.digest) == other
    tier.close()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ("folder" + SUFFIX)).mkdir()
    tier = DiskTier.open(tmp_path, 0, b"model")
    assert not tier.put(make_record(1))
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / ("folder" + SUFFIX)).is_dir()
    assert tier.stats().num_bad_total == 1
    tier.close()


def test_a_file_that_vanished_is_a_miss(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, 10_000, b"model")
    record = make_record(1)
    assert tier.put(record)
    (tmp_path / (record.digest.hex() + SUFFIX)).unlink()
    assert tier.prefetch(record.digest)
    put, got = wait_for(tier, 2)
    assert put.is_ok and got == Landed("get", record.digest, False)
    assert tier.lookup(record.digest) is None
    tier.close()


KILLED = """
import os, sys
from pathlib import Path
from baltoro.cache.disk import DiskTier
from baltoro.cache.tier import TierRecord
assert "torch" not in sys.modules, "the disk tier alone needs no torch"
tier = DiskTier.open(Path(sys.argv[1]), 10_000, b"model")
assert tier.put(TierRecord(b"whole", b"", 64, b"block" * 50, None))
os.fsync = lambda descriptor: os._exit(9)  # power goes before the bytes are safe
tier.put(TierRecord(b"half", b"whole", 128, b"block" * 50, None))
"""


def test_a_process_killed_while_it_writes_leaves_nothing_to_believe(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == 9, done.stderr
    assert len(list(tmp_path.glob("*" + UNFINISHED))) == 1
    tier = DiskTier.open(tmp_path, 10_000, b"model")
    assert not list(tmp_path.glob("*" + UNFINISHED))
    assert tier.lookup(b"half") is None
    whole = tier.get(b"whole")
    assert whole is not None and whole.block == b"block" * 50
    assert tier.stats().num_bad_total == 0
    tier.close()


def test_a_directory_has_one_process(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, 10_000, b"model")
    with pytest.raises(ConfigError, match="a directory of its own"):
        DiskTier.open(tmp_path, 10_000, b"model")
    tier.close()
    DiskTier.open(tmp_path, 10_000, b"model").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use"):
        DiskTier.open(tmp_path / "file", 10_000, b"model")


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
