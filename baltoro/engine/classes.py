"""Long and short requests: a budget of memory and of each step for the long ones, so that a burst of them cannot starve
the short.

A request is long when its prompt has more than `long_prompt_tokens`; 0 switches the classes off. Long requests hold at
most `long_share` of the KV pages together, and take at most that share of a step's tokens while short ones have prompts
to read. Within a class precedence stays strict; between the classes a request may be overtaken by one of the other
class when its own class has spent its share. One long request is always let in when no other long one runs, so that
every request advances.
Source: seed notes on mixed traffic in spec/serving.md B.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baltoro.engine.config import EngineConfig
from baltoro.engine.queue import WaitingLine
from baltoro.engine.request import Request


class LongShort:
    """The two classes. Single writer: the scheduler."""

    def __init__(self, config: EngineConfig, num_tokens: int) -> None:
        """`num_tokens`: that the pool holds."""
        self._num_tokens = num_tokens
        self._limit, self._share = config.long_prompt_tokens, config.long_share
        self._step_tokens = max(1, int(config.max_batch_tokens * config.long_share))  # of none nobody could live
        self._spent = 0

    def is_long(self, request: Request) -> bool:
        return bool(self._limit) and request.num_prompt > self._limit

    def start_step(self) -> None:
        self._spent = 0

    def spend(self, request: Request, num_tokens: int) -> None:
        if self.is_long(request):
            self._spent += num_tokens

    def step_room(self, request: Request, room: int, waiting: WaitingLine) -> int:
        """Tokens of this step that `request` may take."""
        if not self.is_long(request) or all(self.is_long(other) for other in waiting):
            return room
        return max(0, min(room, self._step_tokens - self._spent))

    def next(self, ready: Iterable[Request], running: Sequence[Request]) -> Request | None:
        """The next request to admit of those in line that are ready, in order of precedence."""
        for request in ready:
            if not self.is_long(request) or self._has_share(request, running):
                return request
        return None

    def _has_share(self, request: Request, running: Sequence[Request]) -> bool:
        held = sum(len(other.tokens) for other in running if self.is_long(other))
        return not held or held + len(request.tokens) <= self._share * self._num_tokens
