"""Arithmetic with a tool: several turns, bad calls, hostile expressions, and a sandbox that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice

import pytest

from baltoro.chat.events import ParsedCall
from baltoro.chat.messages import in_call_order, normalise
from baltoro.envs.base import Reply, Task, play, validate
from baltoro.envs.tasks.calculator import MOST_CALLS, PROGRAM, Calculator, CalculatorEnv
from baltoro.errors import SandboxError
from baltoro.sandbox.base import Sandbox
from baltoro.sandbox.process import Isolation, missing

ISOLATION: Isolation = "limits" if missing("full") else "full"
FAMILY = Calculator(isolation=ISOLATION)
pytestmark = pytest.mark.skipif(missing("limits") is not None, reason="process sandboxes are not permitted here")


@pytest.fixture(scope="module")
def env() -> Iterator[CalculatorEnv]:
    made = FAMILY.env()
    assert isinstance(made, CalculatorEnv)
    yield made
    made.close()


@pytest.fixture
def task() -> Task:
    return next(FAMILY.tasks("train", 0))


def call(expression: object, name: str = "calculate", *, is_whole: bool = True) -> Reply:
    return Reply("", calls=(ParsedCall("calculate_0", name, json.dumps({"expression": expression}), is_whole),))


def result(env: CalculatorEnv, task: Task, reply: Reply) -> str:
    env.reset(task)
    step = env.step(reply)
    assert not step.is_done and step.messages[0]["role"] == "tool"
    assert step.messages[0]["tool_call_id"] == reply.calls[0].id
    return str(step.messages[0]["content"])


def test_references_score_1_and_silence_0() -> None:
    assert validate(FAMILY, islice(FAMILY.tasks("eval", 0), 2)) == []


def test_tasks_declare_the_tool(task: Task) -> None:
    assert [tool["function"]["name"] for tool in task.tools] == ["calculate"]


def test_the_result_of_a_call_leads_to_the_answer(env: CalculatorEnv, task: Task) -> None:
    found = result(env, task, call(task.check["expression"]))
    assert env.step(Reply(f"It is {found}.")).is_done
    assert (env.score().score, env.score().reason) == (1.0, "right")


def test_several_calls_of_one_turn_are_all_answered(env: CalculatorEnv, task: Task) -> None:
    env.reset(task)
    calls = tuple(ParsedCall(f"calculate_{i}", "calculate", f'{{"expression": "{i} + 1"}}', True) for i in range(2))
    step = env.step(Reply("", calls=calls))
    assert [(m["tool_call_id"], m["content"]) for m in step.messages] == [("calculate_0", "1"), ("calculate_1", "2")]


def test_what_it_says_can_be_rendered(env: CalculatorEnv, task: Task) -> None:
    env.reset(task)
    reply = call("20 + 1")
    said = {"role": "assistant", "content": "", "tool_calls": [_openai(one) for one in reply.calls]}
    conversation = in_call_order(normalise([*task.messages, said, *env.step(reply).messages]))
    assert conversation[-1] == {
        "role": "tool", "content": "21", "name": "calculate", "tool": "calculate", "tool_call_id": "calculate_0",
    }  # fmt: skip


def _openai(one: ParsedCall) -> dict[str, object]:
    return {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (call("1", name="shell"), "no tool shell"),
        (call("1", is_whole=False), "takes an expression"),
        (call(["1"]), "takes an expression"),
        (Reply("", calls=(ParsedCall("c", "calculate", "{", True),)), "takes an expression"),
        pytest.param(call("9**9**9"), "too long or too much", marks=pytest.mark.slow),
        (call("__import__('os').getcwd()"), "only numbers"),
        (call("\ud800 + 1"), "error"),
        (call("1\0 + 1"), "error"),
        (Reply("", calls=(ParsedCall("c", "calculate", "[" * 200_000, True),)), "takes an expression"),
        (Reply("", calls=(ParsedCall("c", "calculate", "9" * 5000, True),)), "takes an expression"),
        (call("1", name="x" * 4000), f"no tool {'x' * 40},"),
    ],
)
def test_a_bad_call_is_told_to_the_model(env: CalculatorEnv, task: Task, reply: Reply, said: str) -> None:
    found = result(env, task, reply)
    assert found.startswith("error") and said in found
    assert env.step(Reply(f"{task.check['gold']}")).is_done and env.score().score == 1.0


def test_calls_without_number_are_not_all_worked_out(env: CalculatorEnv, task: Task) -> None:
    """A thousand calls of five seconds each would hold the rollout for more than an hour."""
    env.reset(task)
    one = ParsedCall("c", "calculate", '{"expression": "1 + 1"}', True)
    said = [message["content"] for message in env.step(Reply("", calls=(one,) * 1000)).messages]
    assert len(said) == 1000 and said[:MOST_CALLS] == ["2"] * MOST_CALLS
    assert set(said[MOST_CALLS:]) == {f"error: no more than {MOST_CALLS} calls at once"}


def test_an_attempt_that_only_calls_ends(env: CalculatorEnv, task: Task) -> None:
    score = play(env, task, [call("1", name="x")] * 9)
    assert (score.score, score.reason) == (0.0, "no_answer")


def test_a_reply_cut_off_in_its_call_is_truncated(env: CalculatorEnv, task: Task) -> None:
    cut = Reply("", calls=(ParsedCall("c", "calculate", '{"expr', False),), finish_reason="length")
    assert play(env, task, [cut]).reason == "truncated"


def test_a_sandbox_that_fails_excludes_the_attempt(task: Task) -> None:
    def refuse() -> Sandbox:
        raise SandboxError("no room")

    env = CalculatorEnv(refuse)
    score = play(env, task, [call("1 + 1"), Reply("0")])
    assert score.is_excluded and score.detail == "no room"
    assert play(env, task, [Reply(str(task.check["gold"]))]).score == 1.0  # the next attempt starts afresh


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("2 + 3 * 4", "14"), ("(2 + 3) x 4", "20"), ("-7 // 2", "-4"), ("10 / 4", "2.5"), ("10 / 5", "2"),
        ("2 ** 10", "1024"), ("1 / 0", "error: division by zero"), ("", "error"), ("a", "error"), ("True + 1", "error"),
        ("'1' * 3", "error"), ("1 if 1 else 2", "error"), ("(" * 5000 + "1" + ")" * 5000, "error"),
    ],
)  # fmt: skip
def test_the_program_works_out_numbers_alone(text: str, printed: str) -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(PROGRAM)], input=text, capture_output=True, text=True)
    assert done.stdout.startswith(printed) and done.stderr == ""
    assert done.returncode == int(printed.startswith("error"))
