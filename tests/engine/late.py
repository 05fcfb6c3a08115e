"""A device that is late: random waits before, in and after a step, or steps that wait until they are let go."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from threading import Event

from baltoro.engine.batch import Plan, Result
from baltoro.engine.engine import Engine


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

    engine.runner._issue = late_issue  # type: ignore[method-assign]


class Gate:
    """Steps of an overlapped engine wait until they are let go."""

    def __init__(self, engine: Engine) -> None:
        self._open, issue = Event(), engine.runner._issue
        self._open.set()

        def gated(plan: Plan) -> Callable[[], Result]:
            assert self._open.wait(20), "nobody opened the gate"
            return issue(plan)

        engine.runner._issue = gated  # type: ignore[method-assign]

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()
