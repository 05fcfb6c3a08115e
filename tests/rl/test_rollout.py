"""One env with one policy: nothing is tokenised twice, and what is put in is what a whole rendering has there."""

from __future__ import annotations

import json
import re

import pytest

from baltoro.chat.messages import normalise
from baltoro.chat.segments import encode_segments
from baltoro.chat.tokenizer import CLOSE, OPEN, SEP, Tokenizer
from baltoro.chat.xtml import completion_segments, render
from baltoro.envs.base import Task
from baltoro.envs.rewards import SingleTurn
from baltoro.envs.tasks.calculator import TOOL, CalculatorEnv
from baltoro.rl.rollout import Attempt, Talk, decoded, turns
from baltoro.rl.tasks import Drawn
from baltoro.rl.types import Trajectory
from tests.rl.runs import MINI, Brief

TASK = Task(
    "calculator/1",
    "calculator",
    ({"role": "user", "content": "What is 2 + 3?"},),
    (TOOL,),
    {"kind": "number", "gold": 5},
)
FUNCTION = {"name": "calculate", "arguments": json.dumps({"expression": "2 + 3"})}
CALL = {
    "role": "assistant", "content": "", "reasoning_content": "I need it.",
    "tool_calls": [{"id": "calculate_0", "type": "function", "function": FUNCTION}],
}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "calculate_0", "name": "calculate", "content": "5"}
ANSWER = {"role": "assistant", "content": "The answer is 5.", "reasoning_content": "Easy."}


class FakeCalculator(CalculatorEnv):
    """Without a sandbox."""

    def _work_out(self, expression: str) -> str:
        return "5"


class Family:
    name = "calculator"

    def env(self) -> CalculatorEnv:
        return FakeCalculator(lambda: pytest.fail("no sandbox here"))


@pytest.fixture(scope="module")
def talk() -> Talk:
    return Talk(Tokenizer.load(MINI), thinking=True)


def said(message: object, talk: Talk) -> tuple[int, ...]:
    (whole,) = normalise([message])
    return tuple(encode_segments(completion_segments(whole), talk.tokenizer))


def test_a_tool_turn_is_token_for_token_what_a_whole_rendering_has(talk: Talk) -> None:
    attempt = Attempt(Drawn(TASK, Family(), "high"), talk)  # type: ignore[arg-type]
    call = said(CALL, talk)
    num_thoughts = attempt.hear_policy(call[:3]) + attempt.hear_policy(call[3:])
    put_in = attempt.step("stop")
    assert put_in is not None
    messages = [*TASK.messages, CALL, RESULT]
    whole = render(messages, tokenizer=talk.tokenizer, tools=[TOOL], thinking=True, effort="high").ids
    assert attempt.prompt + call + put_in == tuple(whole)
    assert 0 < num_thoughts < len(call)
    answer = said(ANSWER, talk)
    attempt.hear_policy(answer)
    assert attempt.step("stop") is None
    assert attempt.judge().score == 1.0


def test_an_attempt_is_put_where_a_trajectory_stands(talk: Talk) -> None:
    drawn = Drawn(TASK, Family(), None)  # type: ignore[arg-type]
    call, answer = said(CALL, talk), said(ANSWER, talk)
    first = Attempt(drawn, talk)
    first.hear_policy(call)
    put_in = first.step("stop")
    assert put_in is not None
    t = Trajectory(task=TASK.id, group=0, index=0, prompt=first.prompt)
    t = t.say(call, (0.0,) * len(call), 3).hear(put_in).say(answer[:4], (0.0,) * 4, 4)
    assert [(len(ids), is_ended) for ids, is_ended in turns(t)] == [(len(call), True), (4, False)]
    second = Attempt(drawn, talk)
    second.put(t)
    second.hear_policy(answer[4:])
    assert second.step("stop") is None and second.judge().score == 1.0
    t = t.say(answer[4:], (0.0,) * len(answer[4:]), 4)
    replies = decoded(t, drawn, talk)
    assert [reply.content for reply in replies] == ["", "The answer is 5."]
    assert [len(reply.calls) for reply in replies] == [1, 0]


def test_the_effort_is_asked_for_in_the_prompt(talk: Talk) -> None:
    prompts = [talk.prompt(Drawn(TASK, Family(), effort)) for effort in (None, "low", "high")]  # type: ignore[arg-type]
    assert len(set(prompts)) == 3
    assert "low" in talk.tokenizer.decode(prompts[1])


def test_a_reply_that_was_cut_off_earns_nothing(talk: Talk) -> None:
    attempt = Attempt(Drawn(TASK, Family(), None), talk)  # type: ignore[arg-type]
    attempt.hear_policy(said(ANSWER, talk)[:-4])
    assert attempt.step("length") is None
    assert attempt.judge().reason == "truncated"


@pytest.mark.parametrize(
    ("text", "reason", "answer"),
    [
        ("It is 5.<close>think<sep><open>response<sep>5<close>response<sep>", "right", "5"),
        ("It is 5.<close>response<sep>", "wrong_channel", "5"),
        ("It is 6.<close>response<sep>", "no_answer", None),
        ("It is 5.", "wrong_channel", "5"),
        ("It is 5.<close>response<sep><open>response<sep>7<close>response<sep>", "wrong", "7"),
        ("<open>response<sep>5<close>response<sep>", "right", "5"),
    ],
)
def test_thoughts_are_no_answer_however_they_end(talk: Talk, text: str, reason: str, answer: str | None) -> None:
    """Also where a server would show them as one: closed by the response's marker, with none of their own."""
    task = Task("sum/1", "sum", TASK.messages, (), TASK.check)
    attempt = Attempt(Drawn(task, Sums(), None), talk)  # type: ignore[arg-type]
    attempt.hear_policy(ids_of(text, talk))
    assert attempt.step("stop") is None
    found = attempt.judge()
    assert (found.reason, found.answer) == (reason, answer)
    assert found.score == (1.0 if reason == "right" else 0.0)


class Sums:
    name = "sum"

    def env(self) -> SingleTurn:
        return SingleTurn()


def ids_of(text: str, talk: Talk) -> tuple[int, ...]:
    """With <open>, <close> and <sep> for the markers' ids."""
    markers = {"open": OPEN, "close": CLOSE, "sep": SEP}
    found: list[int] = []
    for place, piece in enumerate(re.split(r"<(open|close|sep)>", text)):
        if place % 2:
            found.append(talk.tokenizer.special(markers[piece]))
        elif piece:
            found += talk.tokenizer.encode(piece)
    return tuple(found)


def test_the_family_of_the_tests_pays_for_silence() -> None:
    family = Brief()
    task = next(family.tasks("train", 0))
    env = family.env()
    env.reset(task)
    env.step(family.reference(task)[0])
    assert env.score().score == 1.0
