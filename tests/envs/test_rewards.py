"""What counts as an answer, where it must stand, and what each failure is called."""

from __future__ import annotations

import pytest

from baltoro.chat.events import Parsed
from baltoro.envs.base import Reply, reply_of
from baltoro.envs.rewards import judge, number_in, words_in
from baltoro.errors import ConfigError

NUMBER = {"kind": "number", "gold": 42}
EXACT = {"kind": "exact", "gold": "blue sky"}


@pytest.mark.parametrize(
    ("reply", "score", "reason", "answer"),
    [
        (Reply("The answer is 42."), 1.0, "right", "42"),
        (Reply("1,042 - 1,000 = 42"), 1.0, "right", "42"),
        (Reply(r"It is \boxed{42}, not 7."), 1.0, "right", "42"),
        (Reply("42 or 43"), 0.0, "wrong", "43"),
        (Reply("-42"), 0.0, "wrong", "-42"),
        (Reply("42.5"), 0.0, "wrong", "42.5"),
        (Reply("I do not know.", reasoning="so it is 41"), 0.0, "no_answer", None),
        (Reply("", reasoning="so it is 42"), 0.0, "wrong_channel", "42"),
        (Reply("Done!", reasoning=r"\boxed{42}"), 0.0, "wrong_channel", "42"),
        (Reply("", reasoning=None), 0.0, "no_answer", None),
        (Reply("The answer is 42", finish_reason="length"), 0.0, "truncated", "42"),
        (Reply("", reasoning="so it is 42", finish_reason="length"), 0.0, "truncated", None),
        (Reply("42", finish_reason="abort"), None, "infrastructure", None),
        (Reply("42", finish_reason="error"), None, "infrastructure", None),
    ],
)
def test_reason_codes(reply: Reply, score: float | None, reason: str, answer: str | None) -> None:
    found = judge(reply, NUMBER)
    assert (found.score, found.reason, found.answer) == (score, reason, answer)


def test_right_thoughts_do_not_help_a_wrong_answer() -> None:
    assert judge(Reply("41", reasoning="42"), NUMBER).reason == "wrong"


def test_words_are_compared_whole() -> None:
    assert judge(Reply(" blue sky. "), EXACT).score == 1.0
    assert judge(Reply(r"I say \boxed{blue sky}"), EXACT).score == 1.0
    for text in ("Blue sky", "blue sky or grey sky", "sky"):
        assert judge(Reply(text), EXACT).reason == "wrong"


def test_decimals_have_a_tolerance_and_whole_numbers_none() -> None:
    assert judge(Reply("0.33333"), {"kind": "number", "gold": 1 / 3}).score == 1.0
    assert judge(Reply("42.00001"), NUMBER).score == 0.0
    assert judge(Reply("42.0"), NUMBER).score == 1.0
    big = 10**30 + 1
    assert judge(Reply(str(big)), {"kind": "number", "gold": big}).score == 1.0
    assert judge(Reply(str(big - 1)), {"kind": "number", "gold": big}).score == 0.0


def test_hostile_text_is_read_and_never_evaluated() -> None:
    assert number_in("9" * 100_000) is None
    assert number_in("9**9**9**9") == "9"
    assert number_in("__import__('os')") is None
    assert words_in("\\boxed{" * 1000) is not None


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="number, exact"):
        judge(Reply("1"), {"kind": "vibes", "gold": 1})


def test_a_parsed_completion_becomes_a_reply() -> None:
    reply = reply_of(Parsed("thoughts", "42"), "stop")
    assert judge(reply, NUMBER).score == 1.0
    assert judge(reply_of(Parsed("42", ""), "stop"), NUMBER).reason == "wrong_channel"
