"""Stop rules and masks from outside: order of the checks, what is trimmed, one object per completion."""

from __future__ import annotations

from collections.abc import Sequence

from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.errors import RequestError
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from tests.engine.stub import StubModel, expected, run, submit, tokens_of


class _Run:
    """Stops when the last ids are `stop`."""

    def __init__(self, stop: Sequence[int]) -> None:
        self.stop, self.seen = list(stop), list[int]()

    def push(self, token: int) -> int | None:
        self.seen.append(token)
        return len(self.stop) if self.seen[-len(self.stop) :] == self.stop else None


class _Even:
    """Allows even ids below 40; keeps what it was told."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def allowed(self) -> bytes:
        return b"\x55" * 5

    def push(self, token: int) -> None:
        self.seen.append(token)


def _engine(stop: Sequence[int] = (), masks: list[_Even] | None = None) -> Engine:
    def make_mask(_: Submit) -> _Even | None:
        if masks is None:
            return None
        masks.append(_Even())
        return masks[-1]

    config = EngineConfig(page_size=4, num_pages=40, num_slots=4, dtype="float32", is_poisoned=True, retract_every=3)
    rules = (lambda _: _Run(stop)) if stop else None
    return Engine(StubModel(), config, stop_rules=rules, masks=make_mask)


GREEDY = expected([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12))


def test_a_stop_string_ends_and_its_tokens_are_trimmed() -> None:
    engine = _engine(stop=GREEDY[3:6])
    submit(engine, "a", [1, 2, 3], max_tokens=12)
    found = run(engine)["a", 0]
    assert tokens_of(found) == GREEDY[:6]
    assert (found[-1].finish_reason, found[-1].num_trimmed) == ("stop", 3)


def test_a_stop_wins_over_the_length() -> None:
    engine = _engine(stop=GREEDY[3:6])
    submit(engine, "a", [1, 2, 3], max_tokens=6)
    assert run(engine)["a", 0][-1].finish_reason == "stop"


def test_a_stop_string_before_min_tokens_does_not_end() -> None:
    engine = _engine(stop=GREEDY[1:3])
    submit(engine, "a", [1, 2, 3], max_tokens=5, min_tokens=4)
    found = run(engine)["a", 0]
    assert tokens_of(found) == GREEDY[:5] and found[-1].finish_reason == "length"


def test_the_prompt_is_no_part_of_a_stop_string() -> None:
    engine = _engine(stop=[3, GREEDY[0]])
    submit(engine, "a", [1, 2, 3], max_tokens=3)
    assert tokens_of(run(engine)["a", 0]) == GREEDY[:3]


def test_every_completion_has_a_mask_of_its_own_and_obeys_it() -> None:
    masks: list[_Even] = []
    engine = _engine(masks=masks)
    submit(engine, "a", [1, 2, 3], n=2, max_tokens=7, temperature=1.5, seed=3)
    deltas = run(engine)
    outputs = [tokens_of(deltas["a", index]) for index in range(2)]
    assert [mask.seen for mask in masks] == outputs, "a retraction does not push a token twice"
    assert all(token % 2 == 0 and token < 40 for output in outputs for token in output)


class _Confused:
    """A rule that meets an id it has no text for."""

    def push(self, token: int) -> int | None:
        raise RequestError(f"token id {token} is outside the vocabulary")


def test_a_rule_that_cannot_go_on_fails_its_request_alone() -> None:
    config = EngineConfig(page_size=4, num_pages=40, num_slots=4, dtype="float32")
    engine = Engine(StubModel(), config, stop_rules=lambda params: _Confused() if params.stop else None)
    submit(engine, "bad", [1, 2, 3], stop=("x",))
    submit(engine, "good", [1, 2, 3], max_tokens=12)
    deltas = run(engine)
    (failure,) = deltas["bad", 0]
    assert failure.error_status == 400 and "outside the vocabulary" in str(failure.error)
    assert tokens_of(deltas["good", 0]) == GREEDY
