"""One env with one policy: a task becomes ids, the policy's ids become a reply, the world's answer becomes ids again.

In: a task, the ids that the engine sampled, piece by piece. Out: the prompt, the ids to put in after a turn, a verdict.
Invariants: tokens in, tokens out: what was sampled is never rendered again, only what the world says is rendered, once;
an attempt can be put where a trajectory stands by playing its turns to a fresh env, so it needs no state of its own in
a checkpoint (an env answers the same call the same way, or its answer is in the trajectory already).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baltoro.chat.events import ReasoningWasContent, collect
from baltoro.chat.messages import normalise
from baltoro.chat.parser import StreamParser
from baltoro.chat.segments import encode_segments
from baltoro.chat.tokenizer import Tokenizer
from baltoro.chat.xtml import Options, render, segments
from baltoro.envs.base import Env, Reply, Score, reply_of
from baltoro.protocol.sampling import FinishReason
from baltoro.rl.tasks import Drawn
from baltoro.rl.types import Trajectory


@dataclass(frozen=True, slots=True)
class Talk:
    """How conversations are rendered and read."""

    tokenizer: Tokenizer
    thinking: bool = True

    def prompt(self, drawn: Drawn) -> tuple[int, ...]:
        """Ids of the opening messages with tools and the effort message, and the opening of the first reply."""
        task = drawn.task
        made = render(
            list(task.messages),
            tokenizer=self.tokenizer,
            tools=list(task.tools) or None,
            thinking=self.thinking,
            effort=drawn.effort,
        )
        return tuple(made.ids)

    def put_in(self, messages: tuple[object, ...]) -> tuple[int, ...]:
        """Ids of messages that follow a reply, and the opening of the next one; options stand in the prompt."""
        parts = segments(normalise(list(messages)), Options(thinking=self.thinking))
        return tuple(encode_segments(parts, self.tokenizer))

    def reply(self, ids: tuple[int, ...], finish: FinishReason, *, has_tools: bool, num_calls: int) -> Reply:
        """What the policy said in one turn. Thoughts that end with the response's marker and none of their own stay
        thoughts here, and earn nothing; a server shows them as the answer, but a reward would teach that form."""
        parser = StreamParser(self.tokenizer, thinking=self.thinking, has_tools=has_tools, start_index=num_calls)
        events = [*parser.push(ids), *parser.finish()]
        return reply_of(collect([one for one in events if not isinstance(one, ReasoningWasContent)]), finish)


class Attempt:
    """One attempt under way. Single writer: the collector; `step` and `judge` may run in a thread of their own, one at
    a time."""

    def __init__(self, drawn: Drawn, talk: Talk, prompt: tuple[int, ...] | None = None) -> None:
        """`prompt`: of the task, where another attempt on it has rendered it already."""
        self.drawn, self._talk = drawn, talk
        self.prompt = talk.prompt(drawn) if prompt is None else prompt
        self._env: Env | None = None
        self._turn: list[int] = []
        self._num_calls = 0
        self._parser = StreamParser(talk.tokenizer, thinking=talk.thinking)

    def hear_policy(self, ids: tuple[int, ...]) -> int:
        """Take sampled ids; returns how many of them were thoughts."""
        thinking = 0
        for token in ids:
            is_thought = self._parser.is_thinking
            self._turn.append(token)
            self._parser.push((token,))
            thinking += is_thought and self._parser.is_thinking
        return thinking

    def step(self, finish: FinishReason) -> tuple[int, ...] | None:
        """The turn has ended: ids to put in before the next one, or None where the attempt is over."""
        if self._env is None:
            self._env = self.drawn.family.env()
            self._env.reset(self.drawn.task)
        has_tools = bool(self.drawn.task.tools)
        reply = self._talk.reply(tuple(self._turn), finish, has_tools=has_tools, num_calls=self._num_calls)
        self._num_calls += len(reply.calls)
        self._begin_turn()
        step = self._env.step(reply)
        return None if step.is_done else self._talk.put_in(step.messages)

    def judge(self) -> Score:
        """The verdict, once `step` gave None."""
        assert self._env is not None
        return self._env.score()

    def put(self, trajectory: Trajectory) -> None:
        """Stand where `trajectory` does: every turn that has ended is played again, the last one goes on."""
        self.close()
        self._num_calls = 0
        self._begin_turn()
        for ids, is_ended in turns(trajectory):
            self.hear_policy(ids)
            if is_ended:
                self.step("stop")

    def close(self) -> None:
        """Give the env back. May be called again."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _begin_turn(self) -> None:
        self._turn = []
        self._parser = StreamParser(self._talk.tokenizer, thinking=self._talk.thinking)


def turns(trajectory: Trajectory) -> Iterator[tuple[tuple[int, ...], bool]]:
    """(ids, whether something was put in after them) of each turn of the policy."""
    start = 0
    mask = trajectory.mask
    while start < len(mask):
        end = start
        while end < len(mask) and mask[end]:
            end += 1
        after = end
        while after < len(mask) and not mask[after]:
            after += 1
        yield trajectory.tokens[start:end], after > end
        start = after


def decoded(trajectory: Trajectory, drawn: Drawn, talk: Talk) -> list[Reply]:
    """The replies of a trajectory at its end, as its env saw them: for judging it again."""
    replies, num_calls = [], 0
    every = list(turns(trajectory))
    for number, (ids, _) in enumerate(every):
        is_cut = trajectory.is_truncated and number == len(every) - 1
        finish: FinishReason = "length" if is_cut else "stop"
        reply = talk.reply(ids, finish, has_tools=bool(drawn.task.tools), num_calls=num_calls)
        num_calls += len(reply.calls)
        replies.append(reply)
    return replies
