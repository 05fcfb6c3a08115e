"""A device that is late: steps run on a thread of their own, beside the books, with random waits or behind a gate."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from threading import Event

import torch

from baltoro.engine.batch import Plan, Result
from baltoro.engine.engine import Engine


class Thread:
    """A runner whose steps are done one after the other while the caller goes on, as a GPU's are."""

    def __init__(self, issue: Callable[[Plan], Callable[[], Result]]) -> None:
        self._issue = issue
        # torch counts threads per calling thread
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "device", initializer=torch.set_num_threads, initargs=(threads,))

    def launch(self, plan: Plan) -> Pending:
        return Pending(self._thread.submit(self._issue, plan))


class Pending:
    """The ticket of a step that a thread does."""

    def __init__(self, future: Future[Callable[[], Result]]) -> None:
        self._future = future

    def wait(self) -> Result:
        return self._future.result()()


def make_late(engine: Engine, seed: int, *, longest_s: float = 0.003) -> None:
    """Every step of `engine` begins late and is told of late, by random times."""
    random, never, issue = Random(seed), Event(), engine.runner._issue

    def pause() -> None:
        never.wait(random.random() * longest_s)

    def late_issue(plan: Plan) -> Callable[[], Result]:
        pause()
        finish = issue(plan)
        pause()

        def late_finish() -> Result:
            pause()
            return finish()

        return late_finish

    engine.runner.launch = Thread(late_issue).launch  # type: ignore[method-assign]


class Gate:
    """Steps of an overlapped engine wait until they are let go."""

    def __init__(self, engine: Engine) -> None:
        self._open, issue = Event(), engine.runner._issue
        self._open.set()

        def gated(plan: Plan) -> Callable[[], Result]:
            assert self._open.wait(20), "nobody opened the gate"
            return issue(plan)

        engine.runner.launch = Thread(gated).launch  # type: ignore[method-assign]

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()
