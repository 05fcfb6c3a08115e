"""Which state checkpoints are worth a slot: four policies, chosen by name.

In: where a checkpoint could be taken, or the checkpoints on the path of one that was just taken. Out: yes or no; the
ones that are not needed any more. Invariants: a policy sees depths and kinds only, never ids or bytes; what it gives
up is never pinned, never a fork of the tree, and never the new checkpoint. It does not know how full the pool is:
under pressure the tree evicts the least recently used, whatever the policy.

| name | takes | gives up |
|---|---|---|
| `turns` | everything on offer | passing ones as the request advances; the shallowest above a cap per path |
| `interval` | multiples of an interval | nothing |
| `prompt_end` | ends of prompts and turns | nothing |
| `second_hit` | forks met a second time, ends of turns | nothing |

Source: issue 5; the third idea is vLLM's retention interval 0, the fourth Marconi's (arXiv 2411.19379).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from baltoro.errors import ConfigError

CheckpointKind = Literal["prefill", "prompt_end", "decode", "branch", "turn_end"]
# Taken only because the request had got so far; the next one makes it superfluous.
PASSING: frozenset[CheckpointKind] = frozenset({"prefill", "decode"})
PATH_CAP = 8


class Standing(Protocol):
    """A state checkpoint in the tree, as a policy sees it."""

    @property
    def depth(self) -> int: ...
    @property
    def kind(self) -> CheckpointKind: ...
    @property
    def is_fork(self) -> bool:
        """More than one continuation of it is in the tree."""
        ...

    @property
    def is_state_pinned(self) -> bool: ...


StandingT = TypeVar("StandingT", bound=Standing)


class Retention(Protocol):
    """What the scheduler and the tree ask."""

    def wants(self, kind: CheckpointKind, depth: int, *, prompt_len: int, is_second_hit: bool) -> bool:
        """Whether to take a snapshot at `depth` of a request with a prompt of `prompt_len` tokens.

        `is_second_hit`: an earlier request with the same first `depth` tokens has left its KV in the tree.
        """
        ...

    def superseded(self, path: Sequence[StandingT], new: StandingT) -> list[StandingT]:
        """Those of `path`, the checkpoints above `new` with the shallowest first, that `new` makes superfluous."""
        ...


class _KeepsAll:
    """Gives up nothing by itself."""

    def superseded(self, path: Sequence[StandingT], new: StandingT) -> list[StandingT]:
        return []


@dataclass(frozen=True, slots=True)
class Turns:
    """Made for agents, who come back at the end of a turn or fork off a common start.

    While a request advances it has one passing checkpoint, the newest; what it passed on the way is given up. Ends of
    prompts, ends of turns and forks stay. A conversation of many turns keeps the deepest `cap` of them.
    """

    cap: int = PATH_CAP

    def wants(self, kind: CheckpointKind, depth: int, *, prompt_len: int, is_second_hit: bool) -> bool:
        return True

    def superseded(self, path: Sequence[StandingT], new: StandingT) -> list[StandingT]:
        free = [node for node in path if not node.is_fork and not node.is_state_pinned]
        gone = [node for node in free if node.kind in PASSING]
        surplus = len(path) + 1 - len(gone) - self.cap
        if surplus > 0:
            gone += [node for node in free if node.kind not in PASSING][:surplus]
        return gone


@dataclass(frozen=True, slots=True)
class Interval(_KeepsAll):
    """A checkpoint at every multiple of `interval`, wherever a request passes one, and nowhere else.

    The most hits for prompts that share any length, at the highest price: the slots held grow with the tokens.
    """

    interval: int

    def wants(self, kind: CheckpointKind, depth: int, *, prompt_len: int, is_second_hit: bool) -> bool:
        return depth % self.interval == 0


@dataclass(frozen=True, slots=True)
class PromptEnd(_KeepsAll):
    """At ends of prompts and of turns only: at most two slots a turn.

    A prompt that shares only a part of an earlier one (the same system prompt, say) never hits.
    """

    def wants(self, kind: CheckpointKind, depth: int, *, prompt_len: int, is_second_hit: bool) -> bool:
        return kind in ("prompt_end", "turn_end")


@dataclass(frozen=True, slots=True)
class SecondHit(_KeepsAll):
    """At forks that a second request has come to, and at ends of turns, where the same client will come back.

    The fewest slots. A common start is recomputed twice: by the request that brings it and by the one that shows it is
    common; the third hits.
    """

    def wants(self, kind: CheckpointKind, depth: int, *, prompt_len: int, is_second_hit: bool) -> bool:
        return kind == "turn_end" or (kind == "branch" and is_second_hit)


RETENTION_NAMES = ("turns", "interval", "prompt_end", "second_hit")


def retention_by_name(name: str, *, interval: int, cap: int = PATH_CAP) -> Retention:
    """The policy called `name`. `interval` is for "interval", `cap` for "turns". Errors: ConfigError."""
    if cap < 1 or interval < 1:
        raise ConfigError(f"interval {interval} and cap {cap} must be 1 or more")
    policies: dict[str, Retention] = {
        "turns": Turns(cap),
        "interval": Interval(interval),
        "prompt_end": PromptEnd(),
        "second_hit": SecondHit(),
    }
    if name not in policies:
        raise ConfigError(f"there is no retention policy {name!r}: use one of {', '.join(RETENTION_NAMES)}")
    return policies[name]
