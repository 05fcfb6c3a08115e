"""Trajectory and Group: what a rollout made, as it is trained on, dumped, and kept in a checkpoint.

In: ids as the engine was given them and as it sampled them. Out: frozen structs (msgspec, so they pack themselves).
Invariants: the token is the unit of truth: each has its id, the engine's logprob, the version of the policy that
sampled it, and whether it was sampled at all. A trajectory only grows, at its end; nothing is tokenised twice. One that
failed for reasons of infrastructure has no score, and is excluded from its group, never scored 0.
Source: spec/training.md A.4, C.3, G.2, G.4.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import msgspec

from baltoro.errors import InvariantError, ShapeError

NOT_SAMPLED = -1

# running, paused: it is not at its end. complete: it is, and has a score once it is judged. failed: an infrastructure
# error, there will be no score. stale: older than the cap when it was to be used
Status = Literal["running", "paused", "complete", "failed", "stale"]


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt on one task.

    tokens, logprobs, versions  of equal length, after the prompt. A token that was put in (a tool's output) has version
                    NOT_SAMPLED and logprob 0.0
    thinking_tokens how many of the sampled ones are of the thinking channel
    is_truncated    it ended at its budget, not by itself
    score, answer, reason  the judge's: what it is worth, what was read as the answer, the code of why
    effort          the level that its prompt asks for
    routes          which experts the engine's routers took, as its last request said (`TokenDelta.routed_experts`): of
                    its tokens from the prompt's first on, as far as that request computed them; None: not asked
    """

    task: str
    group: int
    index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    thinking_tokens: int = 0
    status: Status = "running"
    is_truncated: bool = False
    score: float | None = None
    answer: str | None = None
    reason: str = ""
    effort: str | None = None
    routes: bytes | None = None

    def __post_init__(self) -> None:
        lengths = len(self.tokens), len(self.logprobs), len(self.versions)
        if len(set(lengths)) != 1:
            raise ShapeError(f"a trajectory of {lengths} tokens, logprobs and versions")

    @property
    def key(self) -> tuple[int, int]:
        """(group, index within the group): its name within a run."""
        return self.group, self.index

    @property
    def mask(self) -> tuple[bool, ...]:
        """Which tokens were sampled: those that the loss counts."""
        return tuple(version != NOT_SAMPLED for version in self.versions)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens, the whole life long."""
        return len(self.versions) - self.versions.count(NOT_SAMPLED)

    @property
    def sampled_versions(self) -> tuple[int, ...]:
        """The policy versions that had a part in it, ascending."""
        return tuple(sorted(set(self.versions) - {NOT_SAMPLED}))

    def staleness(self, version: int) -> int:
        """How many versions its oldest sampled token is behind `version`; 0 if it has none."""
        return version - self.sampled_versions[0] if self.sampled_versions else 0

    def say(self, tokens: tuple[int, ...], logprobs: tuple[float, ...], version: int, thinking: int = 0) -> Trajectory:
        """Grown by tokens that policy `version` sampled, `thinking` of them in the thinking channel. It copies: say a
        turn or a round at a time, not a token."""
        if version < 0 or self.sampled_versions[-1:] > (version,):
            raise InvariantError(f"version {version} sampled after {self.sampled_versions}: versions only rise")
        return self._grow(tokens, logprobs, (version,) * len(tokens), thinking)

    def hear(self, tokens: tuple[int, ...]) -> Trajectory:
        """Grown by tokens that the environment put in."""
        return self._grow(tokens, (0.0,) * len(tokens), (NOT_SAMPLED,) * len(tokens), 0)

    def _grow(
        self, tokens: tuple[int, ...], logprobs: tuple[float, ...], versions: tuple[int, ...], thinking: int
    ) -> Trajectory:
        if self.status not in ("running", "paused"):
            raise InvariantError(f"trajectory {self.key} is {self.status}: it does not grow any more")
        return msgspec.structs.replace(
            self,
            tokens=self.tokens + tokens,
            logprobs=self.logprobs + logprobs,
            versions=self.versions + versions,
            thinking_tokens=self.thinking_tokens + thinking,
        )


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts on one task, all at their end, in the order of their indices."""

    group: int
    task: str
    members: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if any(t.group != self.group or t.task != self.task for t in self.members):
            raise InvariantError(f"group {self.group} of task {self.task} holds a trajectory of another")
        if [t.index for t in self.members] != list(range(len(self.members))):
            raise InvariantError(f"group {self.group} is not complete: {[t.index for t in self.members]}")

    @property
    def scores(self) -> tuple[float | None, ...]:
        """Of each member; None: excluded."""
        return tuple(t.score if t.status == "complete" else None for t in self.members)


def seed_of(seed: int, key: tuple[int, int]) -> int:
    """Of a trajectory's draws, in every round and turn: they depend on the position besides."""
    digest = blake2b(f"{seed}/{key[0]}/{key[1]}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") >> 3
