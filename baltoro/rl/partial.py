"""The book of partial rollout: who runs, who is paused, when a round ends, which groups may be trained on.

In: events, in the order in which they happened (tokens, ends, verdicts). Out: orders for the engine, complete groups.
No clock, no randomness, no I/O: the same events give the same book, and a copy of it goes into every checkpoint.
A round is one spell of generation between two updates of the policy.
Invariants: a round ends when the share lambda of its trajectories is at its end, not before; what is not goes first in
the next round, oldest first; a group leaves the book once, whole, and never with a token older than the cap at that
moment: the cap is measured when a group is used, not when it was sampled.
The recorded logprobs are those of the policy, and of the state, that really sampled; with `carry` that is a hybrid of
versions which no other forward can compute again.
Source: spec/training.md C.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from baltoro.errors import InvariantError
from baltoro.rl.config import PartialConfig
from baltoro.rl.types import Group, Trajectory

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Order:
    """What the engine is to do for one trajectory, in the order of the list.

    ids            prompt and everything since: where it goes on
    max_tokens     what is left of its budget
    state_version  the policy version that began the KV and state it may go on with; None: compute them from the ids
    """

    key: Key
    ids: tuple[int, ...]
    max_tokens: int
    state_version: int | None


class BookState(msgspec.Struct, frozen=True, kw_only=True):
    """A book as a checkpoint keeps it: between rounds, or in one that was cut off."""

    version: int
    sizes: dict[int, int]
    trajectories: tuple[Trajectory, ...]


@dataclass(slots=True)
class _Entry:
    """A trajectory, and what was said since it was last put together."""

    trajectory: Trajectory
    state_version: int | None = None
    oldest: int | None = None  # version of its first sampled token
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    thinking: int = 0

    @property
    def num_sampled(self) -> int:
        return self.trajectory.num_sampled + len(self.tokens)

    def put_together(self, version: int) -> None:
        if self.tokens:
            said = tuple(self.tokens), tuple(self.logprobs)
            self.trajectory = self.trajectory.say(*said, version, self.thinking)
            self.tokens, self.logprobs, self.thinking = [], [], 0


class Book:
    """Trajectories of all rounds. Single writer: the loop that collects rollouts."""

    def __init__(self, config: PartialConfig) -> None:
        self.config = config
        self.version = 0
        self._sizes: dict[int, int] = {}
        self._entries: dict[Key, _Entry] = {}  # by age: who came first goes first
        self._round: set[Key] | None = None  # the active set of the round that is open

    @property
    def is_open(self) -> bool:
        """Whether a round is going on."""
        return self._round is not None

    def begin(self, version: int, fresh: Sequence[Trajectory] = ()) -> list[Order]:
        """Open a round under policy `version`: what was left over, oldest first, then `fresh`, groups as a whole."""
        if self._round is not None or version < self.version:
            raise InvariantError(f"a round of version {version} after {self.version}, open: {self.is_open}")
        self.version = version
        self._enter(fresh)
        waiting = {key: e for key, e in self._entries.items() if e.trajectory.status in ("paused", "running")}
        if not waiting:
            raise InvariantError("a round without trajectories: nothing was left over, and no fresh group is given")
        self._round = set(waiting)
        orders = []
        for key, entry in waiting.items():
            state = entry.state_version if self.config.resume == "carry" else None
            entry.state_version = version if state is None else state
            entry.trajectory = msgspec.structs.replace(entry.trajectory, status="running")
            ids = entry.trajectory.prompt + entry.trajectory.tokens
            orders.append(Order(key, ids, self.config.max_tokens - entry.num_sampled, state))
        return orders

    def say(self, key: Key, tokens: Sequence[int], logprobs: Sequence[float], version: int, thinking: int = 0) -> None:
        """The policy sampled tokens. `version` is the engine's word for who it was."""
        entry = self._running(key)
        if version != self.version:
            raise InvariantError(f"trajectory {key} was sampled by version {version} in a round of {self.version}")
        if len(tokens) != len(logprobs) or entry.num_sampled + len(tokens) > self.config.max_tokens:
            raise InvariantError(
                f"trajectory {key}: {len(tokens)} tokens, {len(logprobs)} logprobs after {entry.num_sampled} of "
                f"{self.config.max_tokens}"
            )
        if tokens and entry.oldest is None:
            entry.oldest = version
        entry.tokens += tokens
        entry.logprobs += logprobs
        entry.thinking += thinking

    def note_routes(self, key: Key, routes: bytes) -> None:
        """What the engine's routers took in all that its request computed: of every token in its newest forward."""
        entry = self._entries[key]
        entry.trajectory = msgspec.structs.replace(entry.trajectory, routes=routes)

    def hear(self, key: Key, tokens: Sequence[int]) -> None:
        """The environment put tokens in."""
        entry = self._running(key)
        entry.put_together(self.version)
        entry.trajectory = entry.trajectory.hear(tuple(tokens))

    def finish(self, key: Key, *, is_truncated: bool = False) -> None:
        """It is at its end; its verdict may come later."""
        entry = self._running(key)
        entry.put_together(self.version)
        entry.trajectory = msgspec.structs.replace(entry.trajectory, status="complete", is_truncated=is_truncated)

    def fail(self, key: Key, reason: str) -> None:
        """An infrastructure error took it, or its judge: excluded from its group, not scored."""
        entry = self._entries[key]
        entry.put_together(self.version)
        entry.trajectory = msgspec.structs.replace(entry.trajectory, status="failed", reason=reason, score=None)

    def judge(self, key: Key, score: float, *, answer: str | None = None, reason: str = "") -> None:
        """The verdict on a trajectory at its end."""
        entry = self._entries[key]
        if entry.trajectory.status != "complete":
            raise InvariantError(f"trajectory {key} is {entry.trajectory.status}: there is nothing to judge")
        entry.trajectory = msgspec.structs.replace(entry.trajectory, score=score, answer=answer, reason=reason)

    def is_over(self) -> bool:
        """Whether the round may stop: the share is reached and, with finish_first, nobody would pass the cap."""
        active = self._active()
        ended = sum(not self._is_going(key) for key in active)
        return ended >= math.ceil(self.config.share * len(active)) and not self.due()

    def due(self) -> list[Key]:
        """With finish_first: who must come to its end in this round, or its group would be too old after the next
        update (policy versions rise by one a round)."""
        if self.config.stale != "finish_first":
            return []
        oldest: dict[int, int] = {}
        for (group, _), entry in self._entries.items():
            if entry.oldest is not None:
                oldest[group] = min(entry.oldest, oldest.get(group, entry.oldest))
        limit = self.version + 1 - self.config.max_staleness
        going = (key for key in self._entries if key in self._active() and self._is_going(key))
        return [key for key in going if oldest.get(key[0], limit) < limit]

    def stop(self) -> list[Key]:
        """Close the round. Returns who is to be paused in the engine, oldest first. Who has spent its budget, but was
        not yet reported, is at its end."""
        going = [key for key in self._entries if key in self._active() and self._is_going(key)]
        for key in going:
            if self._entries[key].num_sampled == self.config.max_tokens:
                self.finish(key, is_truncated=True)
        going = [key for key in going if self._is_going(key)]
        for key in going:
            entry = self._entries[key]
            entry.put_together(self.version)
            entry.trajectory = msgspec.structs.replace(entry.trajectory, status="paused")
        self._round = None
        return going

    def forget_states(self, keys: Iterable[Key] | None = None) -> None:
        """KV and state of these (None: of all) are gone; they begin with a prefill, whatever the mode."""
        for key in self._entries if keys is None else keys:
            self._entries[key].state_version = None

    def take(self, version: int) -> list[Group]:
        """Groups that are at their end and judged, out of the book, for a step of the policy at `version`.

        A member that is too old at this moment comes as "stale", without part in its group; the caller counts them.
        """
        groups = []
        for group, size in list(self._sizes.items()):
            members = [self._entries[group, index].trajectory for index in range(size)]
            if all(t.status == "failed" or (t.status == "complete" and t.score is not None) for t in members):
                groups.append(Group(group=group, task=members[0].task, members=tuple(self._aged(members, version))))
                del self._sizes[group]
                for t in members:
                    del self._entries[t.key]
                    if self._round is not None:
                        self._round.discard(t.key)
        return groups

    def pending(self) -> tuple[Trajectory, ...]:
        """All trajectories in the book, oldest first: at their end or not."""
        return tuple(entry.trajectory for entry in self._entries.values())

    def trajectory(self, key: Key) -> Trajectory:
        """One in the book, with all that was said."""
        self._entries[key].put_together(self.version)
        return self._entries[key].trajectory

    def state(self) -> BookState:
        """For a checkpoint."""
        for entry in self._entries.values():
            entry.put_together(self.version)
        return BookState(version=self.version, sizes=dict(self._sizes), trajectories=self.pending())

    @classmethod
    def restored(cls, config: PartialConfig, state: BookState) -> Book:
        """From a checkpoint: what was running is paused, and no engine knows its state any more."""
        book = cls(config)
        book.version, book._sizes = state.version, dict(state.sizes)
        for t in state.trajectories:
            status = "paused" if t.status == "running" else t.status
            oldest = t.sampled_versions[0] if t.sampled_versions else None
            book._entries[t.key] = _Entry(msgspec.structs.replace(t, status=status), oldest=oldest)
        return book

    def _aged(self, members: Iterable[Trajectory], version: int) -> Iterable[Trajectory]:
        for t in members:
            is_stale = t.status == "complete" and t.staleness(version) > self.config.max_staleness
            yield msgspec.structs.replace(t, status="stale") if is_stale else t

    def _enter(self, fresh: Sequence[Trajectory]) -> None:
        sizes: dict[int, int] = {}
        for t in fresh:
            if t.key in self._entries or t.group in self._sizes or t.index != sizes.get(t.group, 0) or t.tokens:
                raise InvariantError(f"trajectory {t.key} is not the next one of a fresh group")
            sizes[t.group] = t.index + 1
        self._sizes |= sizes
        self._entries |= {t.key: _Entry(t) for t in fresh}

    def _active(self) -> set[Key]:
        if self._round is None:
            raise InvariantError("no round is open")
        return self._round

    def _is_going(self, key: Key) -> bool:
        return self._entries[key].trajectory.status == "running"

    def _running(self, key: Key) -> _Entry:
        if key not in self._active() or not self._is_going(key):
            raise InvariantError(f"trajectory {key} does not run in this round")
        return self._entries[key]
