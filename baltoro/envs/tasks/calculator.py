"""Arithmetic that is too long for the head, with a calculator at hand: several turns, and a tool in a sandbox.

In: sizes of numbers. Out: tasks with one tool, `calculate(expression)`. Env: calls are worked out and answered until a
reply makes none; that reply is judged.
Invariants: the expression is the model's, so it is run in a sandbox, never here; what is wrong with a call is told to
the model; what is wrong with the sandbox excludes the attempt. No reply can make its attempt excluded, or hold the
rollout with calls without end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from baltoro.chat.events import ParsedCall
from baltoro.envs.base import Env, Json, Reply, Score, Split, Step, Task, infrastructure, question_task
from baltoro.envs.rewards import judge
from baltoro.envs.tasks.arithmetic import Arithmetic
from baltoro.errors import ConfigError, SandboxError
from baltoro.sandbox.base import Limits, Sandbox
from baltoro.sandbox.process import Isolation, ProcessSandbox, python_for

PROGRAM = Path(__file__).with_name("calculate.py")
LIMITS = Limits(wall_s=5.0, cpu_s=1, memory_bytes=256 << 20, num_processes=4, output_bytes=1 << 16)
LONGEST_RESULT = 200  # characters that the model is shown
LONGEST_NAME = 40  # of a tool that is not there
MOST_CALLS = 8  # of one reply that are worked out
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out an expression of numbers, + - * / and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@dataclass(frozen=True)
class Calculator:
    """The family. `max_turns`: replies of an attempt; `isolation`: of the sandbox, see `sandbox.process`."""

    name: str = "calculator"
    low: int = 100
    high: int = 9999
    high_factor: int = 999
    num_terms: int = 3
    max_turns: int = 4
    isolation: Isolation = "full"

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        sums = Arithmetic(self.name, "+-x", self.low, self.high, self.high_factor, self.num_terms)
        for task in sums.tasks(split, seed):
            yield question_task(self.name, task.question, task.check, (TOOL,))

    def env(self) -> Env:
        return CalculatorEnv(lambda: ProcessSandbox(LIMITS, isolation=self.isolation), self.isolation, self.max_turns)

    def reference(self, task: Task) -> Sequence[Reply]:
        call = ParsedCall("calculate_0", "calculate", json.dumps({"expression": task.check["expression"]}), True)
        return [Reply("", calls=(call,)), Reply(f"The answer is {task.check['gold']}.")]


class CalculatorEnv:
    """See the module. Single writer: its rollout. The sandbox is opened by the first call, and serves all attempts."""

    def __init__(self, open_sandbox: Callable[[], Sandbox], isolation: Isolation = "full", max_turns: int = 4) -> None:
        if max_turns < 1:
            raise ConfigError("max_turns must be at least 1")
        self._open_sandbox = open_sandbox
        self._isolation: Isolation = isolation
        self._max_turns = max_turns
        self._sandbox: Sandbox | None = None
        self._task: Task | None = None
        self._replies: list[Reply] = []
        self._failure = ""

    def reset(self, task: Task) -> tuple[Json, ...]:
        self._task, self._replies, self._failure = task, [], ""
        return task.messages

    def step(self, reply: Reply) -> Step:
        self._replies.append(reply)
        if not reply.calls or reply.finish_reason != "stop" or len(self._replies) >= self._max_turns:
            return Step(is_done=True)
        try:
            return Step(tuple(self._answer(call, number) for number, call in enumerate(reply.calls)))
        except SandboxError as error:
            self._failure = str(error)
            return Step(is_done=True)

    def score(self) -> Score:
        if self._failure:
            return infrastructure(self._failure)
        if self._task is None or not self._replies:
            return infrastructure("there was no reply to judge")
        last = self._replies[-1]
        if last.calls and last.finish_reason == "stop":  # what stands beside a call is no answer
            return Score(0.0, "no_answer", detail=f"still calling after {len(self._replies)} turns")
        return judge(last, self._task.check)

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def _answer(self, call: ParsedCall, number: int) -> Json:
        said = self._result(call) if number < MOST_CALLS else f"error: no more than {MOST_CALLS} calls at once"
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": said}

    def _result(self, call: ParsedCall) -> str:
        """What the model is told."""
        if call.name != "calculate":
            return f"error: there is no tool {call.name[:LONGEST_NAME]}, only calculate"
        try:
            arguments = json.loads(call.arguments) if call.is_whole else None
        except (ValueError, RecursionError):
            arguments = None
        expression = arguments.get("expression") if isinstance(arguments, dict) else None
        if not isinstance(expression, str | int | float):
            return "error: calculate takes an expression, as text"
        return self._work_out(str(expression))

    def _work_out(self, expression: str) -> str:
        """Run the program. Errors: SandboxError."""
        if self._sandbox is None:
            self._sandbox = self._open_sandbox()
        command = [python_for(self._isolation), "-I", "-S", "-c", PROGRAM.read_text(encoding="utf-8")]
        # JSON can hold half a surrogate pair, which is no text
        ended = self._sandbox.exec(command, stdin=expression.encode(errors="replace"))
        text = ended.stdout.decode(errors="replace")
        if ended.reason == "exit" and (ended.is_ok or text.startswith("error")):
            return text if len(text) <= LONGEST_RESULT else f"error: the result has {len(text)} characters"
        return "error: this takes too long or too much memory"
