"""Work for the engine's thread that another thread brings: done between two steps, never during one.

In: jobs from other threads. Out: their results, there. Invariants: one thread, the engine's, runs jobs, in order; a job
that was given up because nobody came in time is never run later; whoever waits is told, also when a job fails.
`fileno` becomes readable when a job is due, so that an idle engine can wait for it beside its socket.
"""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from baltoro.errors import TransferError, UserError

T = TypeVar("T")


class Gate:
    """`call` from any thread, the rest from the engine's."""

    def __init__(self) -> None:
        self._due: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._inside, self._outside = socket.socketpair()
        self._inside.setblocking(False)

    def fileno(self) -> int:
        """Readable while jobs are due."""
        return self._inside.fileno()

    def call(self, job: Callable[[], T], *, timeout_s: float) -> T:
        """Have `job` done between two steps, and wait for it.

        Errors: the job's own, if it is its caller's fault; TransferError(timeout) if no step ended in time, and then it
        will not be done; TransferError(install) if the engine failed.
        """
        future: Future[T] = Future()
        self._due.put((job, future))
        try:
            self._outside.send(b"\0")
        except OSError as error:
            raise TransferError("the engine has left", check="peer") from error
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.cancel():
                raise TransferError(f"no step of the engine ended within {timeout_s:g} s", check="timeout") from error
            return future.result()  # it has begun

    def run_due(self) -> int:
        """Do what is due. Out: how many jobs were looked at. Errors: of a job, all that is not its caller's fault."""
        with suppress(BlockingIOError):  # a job can be seen before its byte, or after it
            self._inside.recv(4096)
        count = 0
        while not self._due.empty():
            job, future = self._due.get()
            count += 1
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except UserError as error:
                future.set_exception(error)
            finally:
                if not future.done():
                    future.set_exception(TransferError("the engine failed", check="install"))
        return count

    def close(self) -> None:
        """No more jobs; those that are due are refused."""
        self._inside.close()
        self._outside.close()
        while not self._due.empty():
            self._due.get()[1].set_exception(TransferError("the engine has left", check="peer"))
