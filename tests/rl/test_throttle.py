"""The throttle's rules by hand, and its worth in a simulated engine whose contexts grow, against the best fixed cap."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from baltoro.engine.pressure import Pressure
from baltoro.rl.config import ThrottleConfig
from baltoro.rl.throttle import Throttle, first_throttle, next_throttle, send_now

CONFIG = ThrottleConfig()


def _look(share: float, active: int, queued: int = 0, retractions: int = 0) -> Pressure:
    return Pressure(
        active=active,
        queued=queued,
        max_running=1000,
        page_share=share,
        slot_share=0.0,
        is_unified=True,
        retractions=retractions,
    )


def test_it_starts_where_even_the_longest_fit() -> None:
    assert first_throttle(10_000, 400, CONFIG).cap == 25
    assert first_throttle(10, 400, CONFIG).cap == 1
    assert first_throttle(10**9, 1, CONFIG).cap == CONFIG.most


def test_it_grows_once_a_turnover_while_there_is_room() -> None:
    state = Throttle(20)
    for _ in range(3):
        state = next_throttle(state, _look(0.3, 20), CONFIG, ended=6)
        assert state.cap == 20
    state = next_throttle(state, _look(0.3, 20), CONFIG, ended=2)
    assert (state.cap, state.ended) == (25, 0)
    for look in (_look(0.65, 20), _look(0.3, 20, queued=1)):
        assert next_throttle(Throttle(20), look, CONFIG, ended=50).cap == 20


def test_it_trims_softly_then_hard() -> None:
    assert next_throttle(Throttle(50), _look(0.85, 40), CONFIG, ended=49).cap == 50
    soft = next_throttle(Throttle(50), _look(0.85, 40), CONFIG, ended=50)
    assert soft.cap == int(40 * 0.7 / 0.85) and soft.pause == 0
    hard = next_throttle(Throttle(50), _look(0.95, 40), CONFIG, ended=0)
    assert hard.cap == int(40 * 0.7 / 0.95) and hard.pause == 40 - hard.cap
    assert next_throttle(Throttle(5), _look(0.85, 40), CONFIG, ended=9).cap == 5


def test_a_retraction_and_a_long_line_cut() -> None:
    cut = next_throttle(Throttle(50), _look(0.5, 50, retractions=3), CONFIG, ended=99)
    assert (cut.cap, cut.retractions) == (40, 3)
    assert next_throttle(cut, _look(0.5, 40, retractions=3), CONFIG, ended=0).cap == 40
    state, caps = Throttle(50), []
    for queued in (30, 30, 10, 30, 30, 30):
        state = next_throttle(state, _look(0.5, 50, queued=queued), CONFIG, ended=0)
        caps.append(state.cap)
    assert caps == [50, 50, 50, 50, 50, 45]


def test_it_stays_within_its_bounds_and_sends_what_is_left() -> None:
    tight = ThrottleConfig(least=4, most=6)
    assert next_throttle(Throttle(5), _look(0.99, 5, retractions=1), tight, ended=0).cap == 4
    assert next_throttle(Throttle(5), _look(0.1, 5), tight, ended=9).cap == 6
    assert send_now(Throttle(10), _look(0.1, 4, queued=3)) == 3 and send_now(Throttle(10), _look(0.1, 14)) == 0


@dataclass
class Engine:
    """Runs everything it is sent; a context grows by a token a beat; when the pool is full the youngest is retracted
    and begins anew. Paused ones keep what they have and go first."""

    pool: int
    lengths: list[int]
    active: list[list[int]] = field(default_factory=list)  # [tokens so far, length], oldest first
    paused: list[list[int]] = field(default_factory=list)
    used: int = 0
    done: int = 0  # tokens of trajectories at their end
    retractions: int = 0
    sent: int = 0

    def beat(self, room: int, pause: int = 0) -> int:
        """Returns how many came to their end."""
        for _ in range(pause):
            self.paused.append(self.active.pop())
            self.used -= self.paused[-1][0]
        for _ in range(room):
            self.active.append(self.paused.pop() if self.paused else [0, self.lengths[self.sent % len(self.lengths)]])
            self.used += self.active[-1][0]
            self.sent += 1
        for one in self.active:
            one[0] += 1
        self.used += len(self.active)
        while self.used > self.pool:
            self.used -= self.active.pop()[0]
            self.retractions += 1
        ended = [one[1] for one in self.active if one[0] >= one[1]]
        self.active = [one for one in self.active if one[0] < one[1]]
        self.used -= sum(ended)
        self.done += sum(ended)
        return len(ended)

    def look(self) -> Pressure:
        return _look(self.used / self.pool, len(self.active), 0, self.retractions)


def _late(engine: Engine, advance: Callable[[], None]) -> tuple[int, int]:
    """(tokens done, retractions) after a warm-up."""
    for _ in range(500):
        advance()
    done, retractions = engine.done, engine.retractions
    for _ in range(700):
        advance()
    return engine.done - done, engine.retractions - retractions


def _fixed(lengths: list[int], cap: int) -> tuple[int, int]:
    engine = Engine(1500, lengths)

    def advance() -> None:
        engine.beat(max(0, cap - len(engine.active)))

    return _late(engine, advance)


LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "even": lambda draw: draw.randint(25, 75),
    "heavy": lambda draw: min(200, int(10 * draw.paretovariate(1.1))),
    "two": lambda draw: draw.choice([10, 10, 10, 150]),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_it_comes_near_the_best_fixed_cap_that_retracts_nothing(kind: str) -> None:
    """With three kinds of lengths and contexts that grow; itself it retracts nothing once it has warmed up."""
    draw = random.Random(kind)
    lengths = [LENGTHS[kind](draw) for _ in range(2000)]
    best = max(done for done, retractions in (_fixed(lengths, cap) for cap in range(4, 64, 4)) if not retractions)
    engine, state = Engine(1500, lengths), [first_throttle(1500, 200, CONFIG)]

    def advance() -> None:
        ended = engine.beat(send_now(state[0], engine.look()), state[0].pause)
        state[0] = next_throttle(state[0], engine.look(), CONFIG, ended=ended)

    done, retractions = _late(engine, advance)
    assert done > 0.85 * best and retractions == 0
