"""A runner that computes nothing: it answers each plan with the tokens that a trace wants, on a clock of its own.

In: plans, the outputs of requests, what a step costs. Out: Results; the time that the steps would have taken.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from baltoro.engine.batch import Found, Plan, Result


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step on the device."""

    step_s: float = 0.02
    token_s: float = 20e-6


DEFAULT_COST = StepCost()


class BooksRunner:
    """Computes nothing: the next token is the one that the trace has there."""

    def __init__(self, outputs: dict[str, array[int]], cost: StepCost) -> None:
        self.clock = 0.0
        self._outputs, self._cost = outputs, cost

    def launch(self, plan: Plan) -> Answer:
        """A step that is over at once, on a clock that goes on by what it would have taken."""
        self.clock += self._cost.step_s + self._cost.token_s * plan.num_tokens
        found = []
        for span in plan.spans:
            if span.draw is not None:
                output = self._outputs.get(span.request.request_id, ())
                at = span.draw.position - span.request.num_prompt
                found.append(Found(output[at] if at < len(output) else 0))
        return Answer(Result(found))


@dataclass(frozen=True, slots=True)
class Answer:
    """A Ticket whose step is over."""

    result: Result

    def wait(self) -> Result:
        return self.result
