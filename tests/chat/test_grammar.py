"""What a grammar lets through: every id of a right answer, and of wrong ones only the part that was right."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from baltoro.chat.grammar import Grammars, chat_grammar, json_grammar
from baltoro.chat.messages import normalise
from baltoro.chat.parser import parse
from baltoro.chat.segments import encode_segments
from baltoro.chat.tokenizer import Tokenizer
from baltoro.chat.xtml import completion_segments
from baltoro.errors import RequestError
from baltoro.protocol.sampling import SamplingParams, TokenMask
from baltoro.protocol.worker import Submit

TOK = Tokenizer.of_bytes([b'{"', b'": ', b'"}', b"response", b"think", b"true", b"12", "你".encode(), b"\n\n", b"call"])
GRAMMARS = Grammars(TOK)
END = TOK.eos_ids[0]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "label": {"type": "string", "maxLength": 4}},
    "required": ["x", "label"],
    "additionalProperties": False,
}
AS_POINT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
WEATHER = {
    "type": "function",
    "function": {
        "name": 'get "weather" größe',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": ["integer", "null"], "minimum": -3},
                "unit": {"enum": ["C", "F", 3]},
                "where": {"$ref": "#/$defs/place"},
                "any": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "number"}}], "not": {}},
                "set": {"type": "array", "uniqueItems": True, "description": "llguidance cannot count doubles"},
            },
            "required": ["city", "unit"],
            "$defs": {"place": {"type": "object", "properties": {"p": {"$ref": "#/$defs/place"}}}},
        },
    },
}
FREE = {"type": "function", "function": {"name": "free"}}
NONE = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
}


def ids_of(text: str) -> list[int]:
    return TOK.encode(text, allow_special=True)


def bit(mask: bytes, token: int) -> bool:
    return not mask or bool(mask[token // 8] >> (token % 8) & 1)


def taken(grammar: str | None, ids: list[int]) -> int:
    """How many of `ids` the grammar lets through."""
    assert grammar is not None
    mask = GRAMMARS.mask(grammar)
    for n, token in enumerate(ids):
        if not bit(mask.allowed(), token):
            return n
        mask.push(token)
    return len(ids)


def lets_through(grammar: str | None, text: str) -> bool:
    ids = [*ids_of(text), END]
    return taken(grammar, ids) == len(ids)


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ('{"x": -12, "label": "你"}', True),
        ('{\n  "x":1,\n\n  "label":""\n}', True),
        ('{"x": 1.5, "label": "a"}', False),
        ('{"x": 1}', False),
        ('{"x": 1, "label": "abcde"}', False),
        ('{"x": 1, "label": "a"} ', False),
        ('{"x": 1, "label": "a"', False),
        ("[]", False),
    ],
)
def test_json_follows_its_schema(text: str, is_good: bool) -> None:
    assert lets_through(json_grammar(POINT), text) is is_good


def test_json_object_is_any_object_and_nothing_else() -> None:
    grammar = json_grammar()
    assert lets_through(grammar, '{"a": [1, {"b": null}], "é": true}')
    assert not lets_through(grammar, "[1]")
    assert not lets_through(grammar, '```json\n{"a": 1}\n```')


def test_white_space_comes_to_an_end() -> None:
    assert taken(json_grammar(), ids_of("{" + " " * 60)) == 33


def test_the_message_may_end_only_where_the_grammar_may_stop() -> None:
    mask = GRAMMARS.mask(json_grammar(POINT))
    assert isinstance(mask, TokenMask)
    for token in ids_of('{"x": 1, "label": "a"}'):
        assert not bit(mask.allowed(), END)
        mask.push(token)
    bits = mask.allowed()
    assert [i for i in range(TOK.vocab_size) if bit(bits, i)] == [END]
    assert len(bits) == (TOK.vocab_size + 7) // 8
    mask.push(END)
    assert mask.allowed() == b""  # asked for again after the end: no opinion, no error


def test_an_id_against_the_grammar_leaves_nothing_allowed_and_a_reason() -> None:
    mask = GRAMMARS.mask(json_grammar())
    mask.push(ids_of("x")[0])
    assert not any(mask.allowed())
    assert mask.error
    mask.push(ids_of("{")[0])
    assert not any(mask.allowed())


def test_reasoning_is_free_and_content_is_json() -> None:
    grammar = chat_grammar(TOK, thinking=True, response_format=AS_POINT)
    answer = '<|close|>think<|sep|><|open|>response<|sep|>{"x": 1, "label": "a"}<|close|>response<|sep|>'
    for thought in ("", "any {thought} 你\n\n " * 9):
        assert lets_through(grammar, f"{thought}{answer}<|close|>message<|sep|>")
        assert lets_through(grammar, f"{thought}{answer}")
        parsed = parse([*ids_of(thought + answer), END], TOK, thinking=True)
        assert json.loads(parsed.content) == {"x": 1, "label": "a"}
    assert not lets_through(grammar, "thought only")
    assert not lets_through(grammar, "a<|open|>response<|sep|>{}")
    assert not lets_through(grammar, f"a{answer}trailing text")


def test_content_is_json_from_the_first_id_when_thinking_is_off() -> None:
    grammar = chat_grammar(TOK, thinking=False, response_format={"type": "json_object"})
    assert lets_through(grammar, '{"a": 1}')
    assert lets_through(grammar, '{"a": 1}<|close|>response<|sep|><|close|>message<|sep|>')
    assert taken(grammar, ids_of("a")) == 0


def test_without_a_wish_there_is_no_grammar() -> None:
    for options in ({}, {"response_format": {"type": "text"}}, {"tools": [FREE], "tool_choice": "auto"}):
        assert chat_grammar(TOK, thinking=True, **options) is None  # type: ignore[arg-type]


def said(calls: list[tuple[str, dict[str, Any]]], *, content: str = "", thinking: bool = False) -> list[int]:
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": "hm" if thinking else "",
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    return encode_segments(completion_segments(normalise([message])[0], thinking=thinking), TOK)


NAME = WEATHER["function"]["name"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("calls", "is_good"),
    [
        ([(NAME, {"city": "a<|close|>b", "unit": "C"})], True),
        ([(NAME, {"city": "", "days": -3, "unit": 3, "where": {"p": {"p": {}}}, "any": [1, 2.5]})], True),
        ([(NAME, {"city": "x", "days": None, "unit": "F", "any": True}), ("free", {"ü": [1], "k": "v"})], True),
        ([("now", {}), ("now", {})], True),
        ([(NAME, {"unit": "C"})], False),
        ([(NAME, {"city": "x", "unit": "K"})], False),
        ([(NAME, {"city": 3, "unit": "C"})], False),
        ([(NAME, {"city": "x", "days": -4, "unit": "C"})], False),
        ([(NAME, {"city": "x", "unit": "C", "any": "s"})], False),
        ([(NAME, {"city": "x", "unit": "C", "extra": 1})], False),
        ([("now", {"a": 1})], False),
        ([("other", {})], False),
        ([], False),
    ],
)
def test_required_calls_follow_the_schemas(calls: list[tuple[str, dict[str, Any]]], is_good: bool) -> None:
    for thinking in (False, True):
        grammar = chat_grammar(TOK, thinking=thinking, tools=[WEATHER, FREE, NONE], tool_choice="required")
        ids = said(calls, thinking=thinking)
        assert (taken(grammar, ids) == len(ids)) is is_good


def test_named_choice_and_no_parallel_calls_allow_only_that() -> None:
    named = {"type": "function", "function": {"name": "now"}}
    grammar = chat_grammar(TOK, thinking=False, tools=[WEATHER, NONE], tool_choice=named, is_parallel=False)
    once, twice, other = said([("now", {})]), said([("now", {})] * 2), said([(NAME, {"city": "", "unit": "C"})])
    assert taken(grammar, once) == len(once)
    assert taken(grammar, twice) < len(twice)
    assert taken(grammar, other) < len(other)


def test_json_and_tools_together_give_json_or_calls() -> None:
    grammar = chat_grammar(TOK, thinking=False, response_format=AS_POINT, tools=[NONE], tool_choice="auto")
    point = '{"x": 1, "label": "a"}'
    for ids in (said([], content=point), said([("now", {})], content=point), said([("now", {})])):
        assert taken(grammar, ids) == len(ids)
    for ids in (said([]), said([("now", {})], content="text")):
        assert taken(grammar, ids) < len(ids)
    grammar = chat_grammar(TOK, thinking=False, response_format=AS_POINT, tools=[NONE], tool_choice="none")
    assert taken(grammar, said([("now", {})], content=point)) < len(said([("now", {})], content=point))


def test_whatever_is_drawn_from_the_mask_parses() -> None:
    """A model that knows nothing: it draws evenly from what is allowed, ends when it can."""
    draw = random.Random(0)
    options = {"tools": [WEATHER, FREE], "tool_choice": "required"}
    for round_ in range(6):
        mask = GRAMMARS.mask(str(chat_grammar(TOK, thinking=False, **options)))  # type: ignore[arg-type]
        ids: list[int] = []
        while not ids or ids[-1] != END:
            bits = mask.allowed()
            good = [i for i in range(TOK.vocab_size) if bit(bits, i)]
            ends = [i for i in good if TOK.is_control(i)]
            ids.append(draw.choice(ends or good) if len(ids) > 10 * round_ or END in good else draw.choice(good))
            mask.push(ids[-1])
            assert len(ids) < 5000
        calls = parse(ids, TOK, thinking=False, has_tools=True).tool_calls
        assert calls and all(call.is_whole and isinstance(json.loads(call.arguments), dict) for call in calls)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (
            {"response_format": AS_POINT | {"json_schema": {"schema": {"type": "strin"}}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": AS_POINT | {"json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FREE], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "strin"}}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/no"}}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_grammar(TOK, thinking=False, **options)
    assert caught.value.param == param


def test_a_grammar_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError):
        GRAMMARS.mask("start: nonsense(")


def test_a_submit_says_when_its_grammar_begins() -> None:
    def submit(**options: Any) -> Submit:
        return Submit(request_id="r", token_ids=(1,), params=SamplingParams(), **options)

    assert GRAMMARS.of_submit(submit()) is None
    now = GRAMMARS.of_submit(submit(grammar=json_grammar()))
    assert now is not None
    assert not bit(now.allowed(), ids_of("x")[0])
    later = GRAMMARS.of_submit(submit(grammar=json_grammar(), grammar_after=(5, 5, 6)))
    assert isinstance(later, TokenMask)
    for token in (5, 5, 5, 6):
        assert later.allowed() == b""
        later.push(token)
    assert bit(later.allowed(), ids_of("{")[0])
    assert not bit(later.allowed(), 5)


@pytest.mark.slow
def test_published_vocabulary_makes_masks(k3_tok: Tokenizer) -> None:
    mask = Grammars(k3_tok).mask(str(chat_grammar(k3_tok, thinking=True, response_format=AS_POINT)))
    for token in k3_tok.encode("思考<|close|>think<|sep|><|open|>response<|sep|>{", allow_special=True):
        assert bit(mask.allowed(), token)
        mask.push(token)
    assert len(mask.allowed()) == 163_840 // 8
