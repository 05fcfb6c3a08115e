"""Stop strings over ids and over text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baltoro.chat.stop import StopCutter, check_stops, cut_at_stop, make_stop_rule
from baltoro.chat.tokenizer import Tokenizer
from baltoro.errors import RequestError
from baltoro.protocol.sampling import StopRule

TOK = Tokenizer.of_bytes(
    [b"ab", b" wor", b"ld", b"ld!", b"STOP", b"xSTOPy", b"\xe4\xbd", b"\xbd\xa0", "你好".encode(), b"aba", b"message"]
)


def token(piece: str | bytes) -> int:
    piece = piece.encode() if isinstance(piece, str) else piece
    return next(i for i in range(TOK.vocab_size) if TOK.token_bytes(i) == piece)


def run(pieces: list[str | bytes], *stops: str) -> tuple[int, int] | None:
    """(number of ids taken when the rule stopped, how many of them are trimmed)"""
    rule = make_stop_rule(TOK, stops)
    for n, piece in enumerate(pieces, start=1):
        if (trimmed := rule.push(token(piece))) is not None:
            return n, trimmed
    return None


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["a", "STOP"], ["STOP"], (2, 1)),
        (["a", "S", "T", "O", "P", "b"], ["STOP"], (5, 4)),
        (["a", "xSTOPy", "b"], ["STOP"], (2, 0)),  # inside one id: it starts before the string
        ([" wor", "ld!", "a"], ["world"], (2, 1)),  # starts and ends in the middle of ids
        ([" wor", "ld", "!"], [" world"], (2, 2)),
        (["ab", "aba", "b"], ["bab"], (2, 1)),
        (["a", "STOP"], ["nothing"], None),
        ([b"\xe4\xbd", b"\xa0", "a"], ["你"], (2, 2)),  # a character over two ids
        ([b"\xe4", b"\xbd\xa0"], ["你"], (2, 2)),
        (["你好"], ["好"], (1, 0)),
        (["a", "b", "ab"], ["zzz", "bab", "aba"], (3, 3)),  # the one that ends first
        (["ab"], ["ab", "b"], (1, 1)),  # and of these the longest
        (["S", "T"] * 3 + ["O", "P"], ["STOP"], (8, 4)),
    ],
)
def test_stops_are_found_across_ids_and_whole_ids_counted(
    pieces: list[str | bytes], stops: list[str], expected: tuple[int, int] | None
) -> None:
    assert run(pieces, *stops) == expected


def test_markers_are_no_text_and_control_ids_break_a_match() -> None:
    assert run(["a", "<|close|>", "message", "<|sep|>", "b"], "message") is None
    assert run(["a", "<|open|>", "message", "[PAD]", "message", "<|sep|>", "message"], "message") == (7, 1)
    assert run(["S", "T", "<|end_of_msg|>", "O", "P"], "STOP") is None
    assert run(["S", "T", "<|open|>", "a", "<|sep|>", "O", "P"], "STOP") is None


def test_after_a_stop_that_was_not_obeyed_the_rule_starts_afresh() -> None:
    rule = make_stop_rule(TOK, ["aa"])
    assert isinstance(rule, StopRule)
    assert [rule.push(token("a")) for _ in range(5)] == [None, 2, None, 2, None]


def test_empty_stops_are_refused_and_no_stops_never_stop() -> None:
    with pytest.raises(RequestError) as caught:
        make_stop_rule(TOK, ["a", ""])
    assert caught.value.param == "stop"
    assert check_stops(["a", "b", "a"]) == ("a", "b")
    assert run(["a", "STOP"]) is None


# ids of which texts are made that hold such stops, whole characters or not
SHORT = [i for i in range(TOK.num_base) if set(TOK.token_bytes(i)) <= set("ab你好".encode())]
stops = st.lists(st.text("ab你", min_size=1, max_size=4), max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(SHORT), max_size=12), stops)
def test_the_rule_stops_where_the_text_first_holds_a_stop(ids: list[int], stops: list[str]) -> None:
    rule = make_stop_rule(TOK, stops)
    needles = [s.encode() for s in stops]
    for n in range(1, len(ids) + 1):
        so_far = TOK.decode_bytes(ids[:n])
        found = [(so_far.find(s) + len(s), so_far.find(s)) for s in needles if s in so_far]
        trimmed = rule.push(ids[n - 1])
        assert (trimmed is not None) == bool(found)
        if trimmed is not None:
            place = min(found)[1]
            starts = [len(TOK.decode_bytes(ids[:i])) for i in range(n)]
            assert trimmed == sum(start >= place for start in starts)
            assert so_far.decode(errors="replace")[: len(so_far[:place].decode(errors="replace"))] == cut_at_stop(
                so_far.decode(errors="replace"), stops
            )
            break


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_pieces_put_together_equal_the_text_cut_at_the_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    cutter, shown, rest = StopCutter(stops), "", text
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        shown += cutter.push(rest[:cut])
        rest = rest[cut:]
        assert cut_at_stop(text, stops).startswith(shown)
    assert shown + cutter.finish() == cut_at_stop(text, stops)
    assert cutter.is_stopped == any(s in text for s in stops)


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    cutter = StopCutter(["STOP", "\n\n"])
    assert [cutter.push(p) for p in ("hello ", "ST", "x", "a\n", "b\n\nc", "d")] == [
        "hello ",
        "",
        "STx",
        "a",
        "\nb",
        "",
    ]
    assert cutter.is_stopped
    assert cutter.finish() == ""
    assert cut_at_stop("a b c", []) == "a b c"
