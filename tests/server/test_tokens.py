from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baltoro.chat.stop import make_stop_rule
from baltoro.chat.tokenizer import Tokenizer
from baltoro.protocol.completion import TokenDelta
from baltoro.server.tokens import Holdback, Token, logprob_entry, spell

# Bytes, and a few longer tokens that straddle the borders of stop strings.
EXTRA = [b"xa", b"bc", b"ab", b"abab", b"aab", "ü".encode()]
TOKENIZER = Tokenizer({**{bytes([b]): b for b in range(256)}, **{t: 256 + i for i, t in enumerate(EXTRA)}})


def run(ids: list[int], stops: tuple[str, ...], *, trims_start: bool) -> tuple[bytes, bytes, bool]:
    """What was let go before the end, the whole answer, whether a stop string ended it.

    The engine drops the id in which the stop string starts, or keeps it: text is cut at the same place.
    """
    hold = Holdback(TOKENIZER, stops)
    rule = make_stop_rule(TOKENIZER, stops) if stops else None
    shown = b""
    for i, id_ in enumerate(ids):
        num_trimmed = rule.push(id_) if rule is not None else None
        if num_trimmed is not None:
            num_trimmed = min(i + 1, num_trimmed + trims_start)
            delta = TokenDelta(request_id="r", token_ids=(id_,), finish_reason="stop", num_trimmed=num_trimmed)
            rest = hold.finish(delta)
            assert rest.matched in stops
            assert len(rest.everything) - len(rest.whole) - len(rest.cut) <= num_trimmed
            return shown, shown + TOKENIZER.decode_bytes(t.id for t in rest.whole) + rest.text, True
        shown += TOKENIZER.decode_bytes(t.id for t in hold.push(Token(id_)))
    rest = hold.finish(TokenDelta(request_id="r", finish_reason="length"))
    assert (rest.cut, rest.text, rest.matched) == ([], b"", None)
    return shown, shown + TOKENIZER.decode_bytes(t.id for t in rest.whole), False


@given(
    ids=st.lists(st.sampled_from([97, 98, 99, 120, *range(256, 262)]), max_size=12),
    stops=st.lists(st.text("abcxü", min_size=1, max_size=4), max_size=3),
    trims_start=st.booleans(),
)
def test_the_answer_ends_right_before_the_first_stop_string(
    ids: list[int], stops: list[str], trims_start: bool
) -> None:
    shown, answer, is_stopped = run(ids, tuple(stops), trims_start=trims_start)
    whole = TOKENIZER.decode_bytes(ids)
    assert answer.startswith(shown)
    if is_stopped:
        assert not any(s.encode() in answer for s in stops)
        assert any(whole[len(answer) :].startswith(s.encode()) for s in stops)
        assert whole.startswith(answer)
    else:
        assert answer == whole


def test_without_stop_strings_nothing_is_held() -> None:
    hold = Holdback(TOKENIZER, ())
    assert hold.push(Token(97)) == [Token(97)]


def test_a_token_is_held_only_while_it_may_begin_a_stop_string() -> None:
    hold = Holdback(TOKENIZER, ("abc",))
    assert hold.push(Token(97)) == []
    assert [t.id for t in hold.push(Token(120))] == [97, 120]


def test_a_piece_of_a_character_is_spelled_as_bytes() -> None:
    assert spell(TOKENIZER, 0xC3) == ("bytes:\\xc3", [0xC3])
    entry = logprob_entry(TOKENIZER, Token(261, -0.5))
    assert bytes(entry.bytes) == entry.token.encode() == "ü".encode()
