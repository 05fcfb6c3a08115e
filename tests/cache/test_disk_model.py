"""The disk tier against a plain account, under random operations with jobs that are done late."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baltoro.cache.disk_files import file_bytes
from baltoro.cache.tier import TierRecord
from tests.cache.disk_fakes import CHAIN, NUM_CHAINS, MemoryFiles, SteppedTier, make_record


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


def test_a_wish_is_not_refused_for_the_failure_of_an_earlier_one() -> None:
    model = DiskModel()
    model.start(num_records=1, num_pending=1)
    model.put(name=1, has_state=False, is_later=True)
    model.files.is_failing = True
    model.tier.step()
    model.files.is_failing = False
    assert model.tier.put(make_record(1, has_state=False))
    assert model.tier.put(make_record(1))
    assert [result.is_ok for result in model.tier.landed()] == [False, True, True]


@pytest.mark.nightly
def test_disk_tier_under_many_operations() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(DiskModel, settings=settings(max_examples=2000, stateful_step_count=50, deadline=None))
