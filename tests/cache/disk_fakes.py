"""Records whose bytes follow from their name, and files that are slow, forgetful or kept in memory."""

from __future__ import annotations

import hashlib
import queue
import threading
from pathlib import Path

from baltoro.cache.disk import DiskTier
from baltoro.cache.disk_files import DiskFiles, Files, file_bytes
from baltoro.cache.disk_thread import DiskThread, Done
from baltoro.cache.tier import Landed, TierEntry, TierRecord

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


class SteppedThread(DiskThread):
    """No thread at all: jobs are done when the test says so."""

    def start(self) -> None:
        pass

    def check(self) -> None:
        pass

    def step(self) -> bool:
        """Do the next job, if there is one."""
        if self._jobs.empty():
            return False
        job = self._jobs.get()
        assert job is not None
        self._done.put(self.do(job))
        return True

    def wait(self) -> Done:
        while self._done.empty():
            assert self.step(), "the tier waits for something that nobody does"
        return self._done.get()


class SteppedTier(DiskTier):
    """Its jobs are done when the test says so, one by one, instead of by a thread."""

    def __init__(self, files: Files, max_bytes: int, *, max_pending_bytes: int) -> None:
        self.stepped = SteppedThread(files)
        super().__init__(files, max_bytes, max_pending_bytes=max_pending_bytes, thread=self.stepped)

    def step(self) -> bool:
        return self.stepped.step()


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
