"""What the envs make of turns that have ended: worked out where it is asked for, or in threads, and picked up later.

In: attempts whose turn ended. Out: Ended, of the key of its trajectory: ids to go on with, or a verdict.
Invariants: a sandbox that fails is a verdict of its own ("infrastructure"), never a 0 and never an exception here;
without threads everything happens in the order in which it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from baltoro.envs.base import Score
from baltoro.errors import SandboxError
from baltoro.protocol.sampling import FinishReason
from baltoro.rl.partial import Key
from baltoro.rl.rollout import Attempt
from baltoro.rl.types import Trajectory


@dataclass(frozen=True, slots=True)
class Ended:
    """What an env made of the end of a turn: ids to put in, or a verdict."""

    put_in: tuple[int, ...] | None
    score: Score | None


class Judging:
    """Work under way, by trajectory. Single writer: the collector."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads`: 0 does everything at once, in the caller."""
        self._threads = ThreadPoolExecutor(num_threads) if num_threads else None
        self._futures: dict[Future[Ended], Key] = {}

    def begin(self, key: Key, work: Callable[[], Ended]) -> Ended | None:
        """Do `work`, or give it to a thread: then None, and `take` has it when it is done."""
        if self._threads is None:
            return work()
        self._futures[self._threads.submit(work)] = key
        return None

    @property
    def has_news(self) -> bool:
        """Whether a thread has something to tell."""
        return any(future.done() for future in self._futures)

    @property
    def keys(self) -> Collection[Key]:
        """Of what is under way or not picked up."""
        return self._futures.values()

    def take(self) -> list[tuple[Key, Ended]]:
        """What threads have done since the last call. Errors: what the work raised."""
        done = [future for future in self._futures if future.done()]
        return [(self._futures.pop(future), future.result()) for future in done]

    def close(self) -> None:
        """Let go of the threads; what has not begun is not done."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)


def end_turn(attempt: Attempt, finish: FinishReason) -> Ended:
    """What the env makes of the end of a turn."""
    try:
        put_in = attempt.step(finish)
        return Ended(put_in, None if put_in is not None else attempt.judge())
    except SandboxError as error:
        return Ended(None, Score(None, "infrastructure", detail=str(error)))


def end_again(attempt: Attempt, trajectory: Trajectory, finish: FinishReason) -> Ended:
    """`end_turn`, with a fresh env that is shown everything from the start."""
    try:
        attempt.put(trajectory)
    except SandboxError as error:
        return Ended(None, Score(None, "infrastructure", detail=str(error)))
    return end_turn(attempt, finish)
