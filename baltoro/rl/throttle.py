"""How many trajectories may run at once: a controller that reads an engine's pressure and nothing else.

In: the last state, a look at the engine (`engine.pressure`), how many trajectories ended since. Out: the next state.
Multiplicative both ways: up by a quarter a turnover while there is room, down when the pool is nearly full, when a line
builds up, or when something was retracted. Contexts grow while they run, so a new cap shows in the pool a turnover
later: hence the wide gap between where growth ends and where trimming begins, and one soft trim a turnover.
Invariants: pure; the cap stays within least..most; trajectories that ended without a token are no turnover.
Source: spec/training.md C.15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baltoro.engine.pressure import Pressure
from baltoro.rl.config import ThrottleConfig


@dataclass(frozen=True, slots=True)
class Throttle:
    """cap: trajectories that may run; pause: of the youngest, how many are to stop now; the rest is memory."""

    cap: int
    pause: int = 0
    ended: int = 0  # since the cap last grew or shrank
    long_lines: int = 0  # looks in a row
    retractions: int = 0


def first_throttle(pool_tokens: int, max_tokens: int, config: ThrottleConfig) -> Throttle:
    """The cap at which even the longest trajectories fit all at once."""
    return Throttle(_bounded(pool_tokens // max(1, max_tokens), config))


def next_throttle(last: Throttle, now: Pressure, config: ThrottleConfig, *, ended: int) -> Throttle:
    """One look. ended: trajectories that came to their end with at least one token since the last look."""
    ended += last.ended
    is_long = now.queued > now.active / 2
    long_lines = last.long_lines + 1 if is_long else 0
    share = now.pool_share
    if now.retractions > last.retractions:
        cap = math.floor(min(last.cap, max(now.active, 1)) * config.cut)
    elif share > config.hard or (share > config.soft and ended >= last.cap):
        cap = min(last.cap, math.floor(now.active * config.target / share))
    elif long_lines >= config.patience:
        cap = math.floor(last.cap * config.queue_cut)
        long_lines = 0
    elif ended >= last.cap and share < config.low and not now.queued:
        cap = math.ceil(last.cap * config.growth)
    else:
        return Throttle(last.cap, 0, ended, long_lines, now.retractions)
    cap = _bounded(cap, config)
    pause = max(0, now.active - cap) if share > config.hard else 0
    return Throttle(cap, pause, 0, long_lines, now.retractions)


def send_now(throttle: Throttle, now: Pressure) -> int:
    """Trajectories that may be sent now."""
    return max(0, throttle.cap - now.active - now.queued)


def _bounded(cap: int, config: ThrottleConfig) -> int:
    return max(config.least, min(config.most, cap))
