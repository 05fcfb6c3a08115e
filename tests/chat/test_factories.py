"""The objects that an engine gets for a request's stop strings and grammar."""

from __future__ import annotations

from typing import Any

from baltoro.chat.factories import Factories
from baltoro.chat.grammar import json_grammar
from baltoro.chat.tokenizer import Tokenizer
from baltoro.protocol.sampling import SamplingParams, StopRule
from baltoro.protocol.worker import Submit

TOK = Tokenizer.of_bytes([b"ab"])


def submit(**options: Any) -> Submit:
    return Submit(request_id="r", token_ids=(1,), params=SamplingParams(), **options)


def test_a_plain_request_gets_neither_rule_nor_mask() -> None:
    made = Factories(TOK)
    assert made.stop_rule(SamplingParams()) is None
    assert made.mask(submit()) is None
    assert made.eos_ids == TOK.eos_ids


def test_each_completion_gets_a_rule_of_its_own() -> None:
    made = Factories(TOK)
    rules = [made.stop_rule(SamplingParams(stop=("aa",))) for _ in range(2)]
    letter = TOK.encode("a")[0]
    for rule in rules:
        assert isinstance(rule, StopRule)
        assert rule.push(letter) is None, "half of the string came to the other rule"


def test_a_mask_begins_where_the_request_says() -> None:
    made = Factories(TOK)
    brace, letter = TOK.encode("{")[0], TOK.encode("a")[0]
    now = made.mask(submit(grammar=json_grammar()))
    later = made.mask(submit(grammar=json_grammar(), grammar_after=(letter, letter)))
    assert now is not None
    assert later is not None
    assert now.allowed()
    for _ in range(2):
        assert later.allowed() == b"", "everything is allowed before the run of ids has come"
        later.push(letter)
    allowed = later.allowed()
    assert allowed[brace // 8] >> brace % 8 & 1
    assert not allowed[letter // 8] >> letter % 8 & 1
