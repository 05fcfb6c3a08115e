"""The disk tier: an index in memory, files behind a thread, never more bytes than allowed.

    caller: index, LRU, limits  ----jobs, in order---->  thread: write, read, remove files
                                <---results, polled----

All decisions are the caller's; the thread only does jobs, one after the other. So a read that was asked for before an
eviction is done before the file is removed, and a write that was asked for after it is done after: races are settled
by the order of the queue.
In: records. Out: the same records, or nothing. Invariants: a record is found only after its file is complete; the
files never take more than `max_bytes`, because room is made before a write is queued; a record that cannot be kept or
read is forgotten and counted. The bytes in the queue and in results not picked up are bounded too, except that one
record of any size may always go.
Single caller: the thread of the scheduler. Source: spec/serving.md A.8.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baltoro.cache.disk_files import DiskFiles, Files, file_bytes
from baltoro.cache.disk_thread import DiskThread, Done, Job, JobKind
from baltoro.cache.lru import LeafLru
from baltoro.cache.tier import Landed, TierEntry, TierRecord, TierStats
from baltoro.errors import InvariantError

MAX_PENDING_BYTES = 1 << 30
"""A queue of a few large states; a disk that cannot keep up makes spills be refused, not memory grow."""


@dataclass(slots=True)
class _Item:
    """`number` of the job that wrote it, 0 for a file found at start."""

    entry: TierEntry
    number: int
    has_landed: bool


class DiskTier:
    """A Tier on files. Single caller: the scheduler's thread; its own thread touches files only."""

    def __init__(
        self,
        files: Files,
        max_bytes: int,
        *,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        thread: DiskThread | None = None,
    ) -> None:
        """`thread`: who does the jobs on `files`; one of its own by default."""
        self.max_bytes, self.max_pending_bytes = max_bytes, max_pending_bytes
        self._files = files
        self._items: dict[bytes, _Item] = {}
        self._lru = LeafLru()  # items that have landed
        self._num_bytes = self._num_pending_bytes = self._num_jobs = 0
        self._num_written = self._num_read = self._num_evicted = self._num_refused = self._num_bad = 0
        self._prefetches: dict[bytes, int] = {}
        self._results: list[tuple[Landed, int]] = []  # with the bytes that each keeps in memory
        self._is_closed = False
        self._thread = thread or DiskThread(files)
        self._rebuild()

    @staticmethod
    def open(directory: Path, max_bytes: int, fingerprint: bytes) -> DiskTier:
        """The tier in `directory`, with what is left there from before. `fingerprint` names all that gives the bytes
        their meaning: other files are not believed. Errors: ConfigError."""
        return DiskTier(DiskFiles(directory, fingerprint), max_bytes)

    def lookup(self, digest: bytes) -> TierEntry | None:
        item = self._items.get(digest)
        return item.entry if item is not None and item.has_landed else None

    def is_landing(self, digest: bytes) -> bool:
        item = self._items.get(digest)
        return item is not None and not item.has_landed

    def touch(self, digest: bytes) -> None:
        if digest in self._lru:
            self._lru.touch(digest)

    def put(self, record: TierRecord) -> bool:
        """Also reported by landed(), as after put_later. A write that was on its way already and fails is no answer to
        this wish: what stopped it may be over, so the record is then written by a job of its own."""
        num_jobs = self._num_jobs
        if not self._accept(record, is_patient=True):
            return False
        is_own = self._num_jobs > num_jobs
        while self.is_landing(record.digest):
            self._apply(self._thread.wait())
        return self.lookup(record.digest) is not None or (not is_own and self.put(record))

    def get(self, digest: bytes) -> TierRecord | None:
        entry = self.lookup(digest)
        if entry is None:
            return None
        self.touch(digest)
        number = self._submit("get", digest, entry.num_bytes)
        while True:
            done = self._thread.wait()
            self._apply(done)
            if done.job.number == number:
                _, num_bytes = self._results.pop()
                self._num_pending_bytes -= num_bytes
                return done.record

    def put_later(self, record: TierRecord) -> bool:
        return self._accept(record, is_patient=False)

    def prefetch(self, digest: bytes) -> bool:
        entry = self.lookup(digest)
        if entry is None:
            return False
        self.touch(digest)
        if digest in self._prefetches:
            return True
        if not self._can_queue(entry.num_bytes):
            self._num_refused += 1
            return False
        self._prefetches[digest] = self._submit("get", digest, entry.num_bytes)
        return True

    def landed(self) -> list[Landed]:
        """Errors: InvariantError if the thread died."""
        self._thread.check()
        self._apply_all()
        results, self._results = self._results, []
        self._num_pending_bytes -= sum(num_bytes for _, num_bytes in results)
        return [result for result, _ in results]

    def drop(self, digest: bytes) -> bool:
        if digest not in self._items:
            return False
        self._forget(digest)
        self._submit("remove", digest)
        return True

    def clear(self) -> int:
        return sum(self.drop(digest) for digest in list(self._items))

    def stats(self) -> TierStats:
        return TierStats(
            num_entries=len(self._lru),
            num_bytes=self._num_bytes,
            max_bytes=self.max_bytes,
            num_pending_bytes=self._num_pending_bytes,
            num_written_total=self._num_written,
            num_read_total=self._num_read,
            num_evicted_total=self._num_evicted,
            num_refused_total=self._num_refused,
            num_bad_total=self._num_bad,
        )

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.close()
        self._apply_all()
        self._files.close()

    def _rebuild(self) -> None:
        """The index of what lies there; what is over the limit goes."""
        entries, self._num_bad = self._files.scan()
        for entry in entries:
            self._items[entry.digest] = _Item(entry, 0, True)
            self._lru.add(entry.digest, entry.parent or None)
            self._num_bytes += entry.num_bytes
        self._make_room(0)

    def _accept(self, record: TierRecord, *, is_patient: bool) -> bool:
        """Queue a write, unless as much is there, or on its way. Whether the record is or will be kept."""
        num_bytes = file_bytes(record)
        known = self._items.get(record.digest)
        if known is not None and (known.entry.has_state or record.state is None):
            self.touch(record.digest)
            return True
        if num_bytes > self.max_bytes or not (is_patient or self._can_queue(num_bytes)):
            self._num_refused += 1
            return False
        self.drop(record.digest)  # a block whose state comes now is written anew
        if not self._make_room(num_bytes):
            self._num_refused += 1
            return False
        number = self._submit("put", record.digest, num_bytes, record)
        entry = TierEntry(record.digest, record.parent, record.depth, record.state is not None, num_bytes)
        self._items[record.digest] = _Item(entry, number, False)
        self._num_bytes += num_bytes
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until `num_bytes` more may be kept; False if what is left is still being written."""
        while self._num_bytes + num_bytes > self.max_bytes:
            digest = self._lru.oldest()
            if digest is None:
                return False
            self.drop(digest)
            self._num_evicted += 1
        return True

    def _forget(self, digest: bytes) -> None:
        self._num_bytes -= self._items.pop(digest).entry.num_bytes
        if digest in self._lru:
            self._lru.remove(digest)

    def _can_queue(self, num_bytes: int) -> bool:
        return not self._num_pending_bytes or self._num_pending_bytes + num_bytes <= self.max_pending_bytes

    def _submit(self, kind: JobKind, digest: bytes, num_bytes: int = 0, record: TierRecord | None = None) -> int:
        if self._is_closed:
            raise InvariantError("the disk tier was used after close()")
        self._thread.check()
        self._num_jobs += 1
        self._num_pending_bytes += num_bytes
        self._thread.put(Job(self._num_jobs, kind, digest, num_bytes, record))
        return self._num_jobs

    def _apply_all(self) -> None:
        while (done := self._thread.poll()) is not None:
            self._apply(done)

    def _apply(self, done: Done) -> None:
        """Let the index know how a job went, unless it has moved on since the job was queued."""
        job, item = done.job, self._items.get(done.job.digest)
        if job.kind == "put":
            self._num_pending_bytes -= job.num_bytes
            self._results.append((Landed("put", job.digest, done.is_ok), 0))
            self._num_written += done.is_ok
            self._num_bad += not done.is_ok
            if item is None or item.number != job.number:
                return
            if done.is_ok:
                item.has_landed = True
                self._lru.add(job.digest, item.entry.parent or None)
            else:
                self._forget(job.digest)
        elif job.kind == "get":
            self._results.append((Landed("get", job.digest, done.is_ok, done.record), job.num_bytes))
            self._num_read += done.is_ok
            self._num_bad += not done.is_ok
            if self._prefetches.get(job.digest) == job.number:
                del self._prefetches[job.digest]
            if not done.is_ok and item is not None and item.number < job.number:
                self._forget(job.digest)
