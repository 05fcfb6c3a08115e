"""What counts as an answer, where it must stand, and what each failure is called."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    assert number_in("9**9**9**9") == "9**9"
    assert number_in("__import__('os')") is None
    assert words_in("\\boxed{" * 1000) is not None


@pytest.mark.parametrize(
    "text",
    [
        "**42**", "$42$", "42.", "42!", "(42)", "`42`", "Answer:42", "+42", "7 + 35 = 42", "7 × 6 = 42", "6×7→42",
        "_42_", "答案是42。", "é42", r"\boxed{42}", r"\boxed{\text{it is }42}", r"\boxed{ 42. }", r"\(42\)", "042",
        "42.00", "...42...", "It is 42 ✅️", "42\n", "1 -- 42", r"a \boxed{7} b \boxed{42}", "41 - no, it is 42",
        "42 @ home",
    ],
)  # fmt: skip
def test_honest_ways_to_write_an_answer_are_read(text: str) -> None:
    assert judge(Reply(text), NUMBER).reason == "right", number_in(text)


@pytest.mark.parametrize(
    "text",
    [
        # several answers, or something that could be several
        r"\boxed{41, 42}", r"\boxed{41 or 42}", "41-42", "41–42", "±42", "41,42", "41/42", r"\boxed{42} no, \boxed{41}",
        # a piece of something else
        "1/42", r"\frac{1}{42}", r"\boxed{\frac{1}{42}}", "1e42", "0x42", "x42", "2^42", "√42", "42%", "42kg", "1_042",
        # an echo of the question, or an expression nobody worked out
        "84 - 42", "84-42", "What is 84 - 42?", "2 x 42", "2 × 42", r"1 \times 42", r"\boxed{84 - 42}", "9*42",
        "(1 + 1) * 42",
        # digits and signs that are not ASCII's
        "٤٢", "４２", "4٢", "४२", "−42", "－42", "‑42", "= - 42", r"\boxed{- 42}", "42²", "4²2", "4\u200b2", "42\u0301",
        "\u202e42\u202c", "½42", "42\x1a7", "42\x1b1",
    ],
)  # fmt: skip
def test_ways_to_get_a_number_paid_that_is_not_the_answer(text: str) -> None:
    assert judge(Reply(text), NUMBER).score == 0.0, number_in(text)


@pytest.mark.parametrize("text", ["−42", "–42", "-42", "= - 42", r"\boxed{- 42}", r"\boxed{−42}", "It is −42."])
def test_a_minus_is_one_however_it_is_written(text: str) -> None:
    assert judge(Reply(text), {"kind": "number", "gold": -42}).score == 1.0, number_in(text)


def test_nothing_is_not_near_to_a_small_number() -> None:
    for gold in (0.00005, -0.00009):
        assert judge(Reply("0"), {"kind": "number", "gold": gold}).score == 0.0
        assert judge(Reply(f"{gold:f}"), {"kind": "number", "gold": gold}).score == 1.0
    assert judge(Reply(".5"), {"kind": "number", "gold": 0.5}).score == 1.0


def test_a_box_holds_its_braces_and_an_open_one_holds_nothing() -> None:
    assert words_in(r"\boxed{\text{blue} sky}") == r"\text{blue} sky"
    assert words_in(r"\boxed{blue sky") == r"\boxed{blue sky"
    assert number_in(r"\boxed{42") == "42"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_can_be_judged(text: str) -> None:
    for check in (NUMBER, EXACT, {"kind": "number", "gold": 0.25}):
        found = judge(Reply(text, reasoning=text), check)
        assert found.score in (0.0, 1.0)
        if check is NUMBER and found.score:
            assert "42" in text.replace(",", "")


@pytest.mark.parametrize("piece", ["9", "\\boxed{", "\\frac{1}{", "\\frac ", "- ", "1 ", "9.", "{", "٤", "9 * "])
def test_long_text_is_read_in_one_go(piece: str) -> None:
    begin = time.process_time()
    judge(Reply(piece * 100_000), NUMBER)
    judge(Reply(piece * 100_000), EXACT)
    assert time.process_time() - begin < 5.0


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="number, exact"):
        judge(Reply("1"), {"kind": "vibes", "gold": 1})


def test_a_parsed_completion_becomes_a_reply() -> None:
    reply = reply_of(Parsed("thoughts", "42"), "stop")
    assert judge(reply, NUMBER).score == 1.0
    assert judge(reply_of(Parsed("42", ""), "stop"), NUMBER).reason == "wrong_channel"
