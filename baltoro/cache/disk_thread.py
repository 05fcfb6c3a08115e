"""The thread of the disk tier: does jobs on files, one after the other, in the order in which they were asked for.

In: Jobs. Out: a Done for each, in the same order, to be polled or waited for.
Invariants: nothing is decided here; a file that cannot be used is a record that is lost, not an error; whoever waits
for a thread that died gets an InvariantError.
Single caller: `disk.py`. The thread touches files only.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Literal

from baltoro.cache.disk_files import Files
from baltoro.cache.tier import TierRecord
from baltoro.errors import InvariantError
from baltoro.observe import log, logger

JobKind = Literal["put", "get", "remove"]


@dataclass(frozen=True, slots=True)
class Job:
    """`number` tells jobs apart; `num_bytes` are held in memory until the result is picked up."""

    number: int
    kind: JobKind
    digest: bytes
    num_bytes: int = 0
    record: TierRecord | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """How a job went; with what was read."""

    job: Job
    is_ok: bool
    record: TierRecord | None = None


class DiskThread:
    """Jobs in, results out. Single caller: the tier."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="disk tier", daemon=True)
        self.start()

    def start(self) -> None:
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue it."""
        self._jobs.put(job)

    def poll(self) -> Done | None:
        """The next result, if it is there."""
        try:
            return self._done.get_nowait()
        except queue.Empty:
            return None

    def wait(self) -> Done:
        """The next result. Errors: InvariantError if the thread died."""
        while True:
            try:
                return self._done.get(timeout=1)
            except queue.Empty:
                self.check()

    def check(self) -> None:
        """Errors: InvariantError if the thread died."""
        if not self._is_closed and not self._thread.is_alive():
            raise InvariantError("the thread of the disk tier died; its traceback is on stderr")

    def close(self) -> None:
        """Once everything that is queued is done."""
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        """Jobs until None comes."""
        while (job := self._jobs.get()) is not None:
            self._done.put(self.do(job))

    def do(self, job: Job) -> Done:
        """One job; a file that cannot be used is a record that is lost, not an error."""
        try:
            if job.kind == "get":
                record = self._files.read(job.digest)
                return Done(job, record is not None, record)
            if job.record is not None:
                self._files.write(job.record)
            else:
                self._files.remove(job.digest)
        except OSError as error:
            log(logger("cache"), "disk tier", level=logging.WARNING, job=job.kind, error=str(error))
            return Done(job, False)
        return Done(job, True)
