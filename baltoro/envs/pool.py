"""Judges in processes that can be killed: time limits that hold, and failures that are told from zeros.

In: the name of a function ("package.module:function") and its arguments, as JSON. Out: `Score`.
A judge that does not end in time is killed with everything it started, and the attempt scores 0 with reason timeout:
the answer did that. A judge that dies, raises, or returns something else failed itself: tried again, then
`infrastructure`, which is excluded and never 0.
Invariants: no call lasts longer than its limits; a killed or lost worker costs its own call alone; workers inherit no
environment, and end on their own where this process is gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import msgspec

from baltoro.envs.base import Score, infrastructure
from baltoro.errors import ConfigError

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from baltoro.envs.pool_worker import main; main()"
IMPORT_S = 120.0  # until a worker has loaded the judge's packages, on a busy machine


@dataclass(frozen=True, slots=True)
class Job:
    """One call of a judge."""

    function: str
    arguments: Mapping[str, Any]


class Lost(Exception):
    """A worker that is of no more use."""


class RewardPool:
    """`num_workers` judges. May be called by several threads; each call holds one worker.

    `timeout_s`: of one call, loading the judge's packages not included; `num_retries`: after a failure of ours.
    """

    def __init__(
        self, num_workers: int = 2, *, timeout_s: float = 10.0, num_retries: int = 1, memory_bytes: int = 4 << 30
    ) -> None:
        if num_workers < 1 or timeout_s <= 0 or num_retries < 0:
            raise ConfigError("a pool needs at least one worker, a timeout above 0, and retries of 0 or more")
        self._timeout_s = timeout_s
        self._num_retries = num_retries
        self._memory_bytes = memory_bytes
        self._idle: SimpleQueue[_Worker | None] = SimpleQueue()  # None: room for one that is to be started
        self.num_workers = num_workers
        for _ in range(num_workers):
            self._idle.put(None)

    def score(self, job: Job) -> Score:
        """Judge. Never raises for what the judge does."""
        why = ""
        for _ in range(1 + self._num_retries):
            worker = self._idle.get()
            score: Score | None = None
            try:
                worker = worker or _Worker(self._timeout_s, self._memory_bytes)
                score = worker.ask(job, self._timeout_s)
            except Lost as error:
                why = str(error)
            finally:
                if worker is not None and (score is None or score.reason == "timeout"):
                    worker.kill()
                    worker = None
                self._idle.put(worker)
            if score is not None:
                return score
        return infrastructure(f"{job.function} failed {1 + self._num_retries} times: {why}")

    def score_all(self, jobs: Iterable[Job]) -> list[Score]:
        """Judge many, as many at once as there are workers; in their order."""
        with ThreadPoolExecutor(self.num_workers) as threads:
            return list(threads.map(self.score, jobs))

    def close(self) -> None:
        """End the workers. Not while calls are under way."""
        for _ in range(self.num_workers):
            worker = self._idle.get()
            if worker is not None:
                worker.kill()
            self._idle.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """One process, in a session of its own. Errors: Lost where it does not start."""

    def __init__(self, timeout_s: float, memory_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-c", START, json.dumps([os.path.abspath(path) for path in sys.path])),
                    *(str(theirs.fileno()), str(timeout_s), str(memory_bytes)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise Lost(f"no process for a judge: {error}") from error
        finally:
            theirs.close()
        self._connection = Connection(ours.detach())

    def ask(self, job: Job, timeout_s: float) -> Score:
        """Errors: Lost where the judge failed."""
        try:
            self._connection.send_bytes(msgspec.json.encode({"function": job.function, "arguments": job.arguments}))
            if not self._connection.poll(IMPORT_S):
                raise Lost("the judge's packages do not load")
            self._reply()
            if not self._connection.poll(timeout_s):
                return Score(0.0, "timeout", detail=f"{job.function} did not end within {timeout_s} s")
            score = self._reply().get("score")
            if score is None:
                raise Lost("the judge returned no score")
            return msgspec.convert(score, Score)
        except (EOFError, OSError) as error:
            raise Lost("the judge's process ended") from error
        except (msgspec.MsgspecError, ConfigError) as error:
            raise Lost(f"the judge returned no score: {error}") from error

    def _reply(self) -> dict[str, Any]:
        reply = msgspec.json.decode(self._connection.recv_bytes(), type=dict[str, Any])
        if "error" in reply:
            raise Lost(reply["error"])
        return reply

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
