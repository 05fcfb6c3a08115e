"""The stream parser: every cut of the ids gives the same answer, and models that err are understood."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baltoro.chat.events import (
    ContentDelta,
    Event,
    Parsed,
    ParsedCall,
    ReasoningDelta,
    ReasoningWasContent,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    collect,
    joined,
)
from baltoro.chat.messages import normalise
from baltoro.chat.parser import StreamParser, parse
from baltoro.chat.segments import encode_segments
from baltoro.chat.tokenizer import Tokenizer
from baltoro.chat.xtml import completion_segments

# Tokens that cross the borders of words, of markers written as text, and of characters.
MERGES = [b"res", b"pon", b"se", b"response", b"call", b"arg", b"ument", b"<|", b"|>", b"close", b"<|close", b"k"]
MERGES += [
    b"think",
    b"message",
    b'="',
    b'">',
    b'" ',
    b'key="',
    "é".encode(),
    "你".encode(),
    b"\xf0\x9f",
    b"\xf0\x9f\x98",
]
TOK = Tokenizer.of_bytes(MERGES)
O, C, S, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"  # noqa: E741
ANSWER = f"{C}think{S}{O}response{S}"
TAIL = f"{C}message{S}{END}"


def arg(key: str, kind: str, value: str) -> str:
    return f'{O}argument key="{key}" type="{kind}"{S}{value}{C}argument{S}'


def call(name: str, *arguments: str, index: int = 1) -> str:
    return f'{O}call tool="{name}" index="{index}"{S}{"".join(arguments)}{C}call{S}'


def tools(*calls: str) -> str:
    return f"{O}tools{S}{''.join(calls)}{C}tools{S}"


def ids_of(text: str) -> list[int]:
    return TOK.encode(text, allow_special=True)


def whole(text: str | list[int], *, thinking: bool = True, has_tools: bool = True, start_index: int = 0) -> Parsed:
    ids = ids_of(text) if isinstance(text, str) else text
    return parse(ids, TOK, thinking=thinking, has_tools=has_tools, start_index=start_index)


def stream(ids: list[int], cuts: list[int], **options: Any) -> list[Event]:
    parser = StreamParser(TOK, **({"thinking": True, "has_tools": True} | options))
    events: list[Event] = []
    for a, b in pairwise([0, *sorted(cuts), len(ids)]):
        events += parser.push(ids[a:b])
    return events + parser.finish()


def args_of(parsed: Parsed) -> list[Any]:
    return [json.loads(c.arguments) for c in parsed.tool_calls]


CASES = [
    f"I think é你😀.{ANSWER}Hello, 你好!{C}response{S}{TAIL}",
    f"why{ANSWER}ok{C}response{S}"
    + tools(call("f", arg("s", "string", 'a "q"\\\n😀'), arg("n", "number", "1")), call("g", index=2))
    + TAIL,
    f"{ANSWER}{C}response{S}{TAIL}",
    f"no marker at all, cut {C}thi",
    f"reason{O}tools{S}{call('f', arg('o', 'object', '{}'))}",
    f"x{ANSWER}y{C}response{S}{O}tools{S}{O}call tool=",
    f"{C}nonsense{S}{O}{O}{S}{C}{S}{ANSWER}[BOS]z{O}x y=1{S}",
]


@pytest.mark.parametrize("text", CASES)
def test_every_cut_gives_the_same_events(text: str) -> None:
    ids = ids_of(text)
    expected = list(joined(stream(ids, [])))
    assert list(joined(stream(ids, list(range(1, len(ids)))))) == expected
    for cut in range(1, len(ids)):
        assert list(joined(stream(ids, [cut]))) == expected
    assert collect(expected) == whole(ids)


@pytest.mark.parametrize("text", CASES)
def test_markers_may_be_spelt_with_any_tokens(text: str) -> None:
    """The names between the control ids come byte by byte: the most that a model can split them."""
    bytewise = [
        i for token in ids_of(text) for i in ([token] if TOK.is_control(token) else map(byte, TOK.token_bytes(token)))
    ]
    assert whole(bytewise) == whole(text)


def byte(value: int) -> int:
    return next(i for i in range(256) if TOK.token_bytes(i) == bytes([value]))


def test_reasoning_and_answer_are_told_apart() -> None:
    parsed = whole(CASES[0])
    assert parsed == Parsed(reasoning="I think é你😀.", content="Hello, 你好!")


def test_thinking_off_puts_everything_into_the_content() -> None:
    assert whole(f'{{"a": 1}}{C}response{S}{TAIL}', thinking=False) == Parsed(reasoning=None, content='{"a": 1}')
    assert whole(f"a{C}think{S} b", thinking=False).content == "a b"


def test_calls_have_names_ids_and_json_arguments() -> None:
    parsed = whole(CASES[1])
    assert parsed.content == "ok"
    assert parsed.tool_calls == (
        ParsedCall("f_0", "f", '{"s": "a \\"q\\"\\\\\\n😀", "n": 1}', True),
        ParsedCall("g_1", "g", "{}", True),
    )
    assert args_of(parsed)[0] == {"s": 'a "q"\\\n😀', "n": 1}


def test_ids_go_on_over_the_turns() -> None:
    parsed = whole(f"{ANSWER}{C}response{S}" + tools(call("NAME", index=3)), start_index=2)
    assert parsed.tool_calls[0].id == "NAME_2"


def test_strings_stream_and_other_values_come_whole() -> None:
    ids = ids_of(f"{ANSWER}{C}response{S}" + tools(call("f", arg("s", "string", "abc"), arg("o", "array", "[1, 2]"))))
    events = [e for e in stream(ids, list(range(1, len(ids)))) if not isinstance(e, ReasoningDelta)]
    assert events[0] == ToolCallBegin(0, "f_0", "f")
    assert events[-1] == ToolCallEnd(0)
    fragments = [e.json_fragment for e in events if isinstance(e, ToolCallArguments)]
    assert fragments == ['{"s": "', "a", "b", "c", '"', ', "o": ', "[1, 2]", "}"]


def test_long_arguments_come_through_unharmed() -> None:
    value = 'line "x"\n<|close|>argument<|sep|> \\ 你😀\t' * 500
    head = ids_of(f'{ANSWER}{O}tools{S}{O}call tool="f"{S}{O}argument key="s" type="string"{S}')
    tail = ids_of(f"{C}argument{S}{C}call{S}{C}tools{S}{TAIL}")
    parsed = whole(head + TOK.encode(value) + tail)
    assert args_of(parsed) == [{"s": value}]


def test_text_that_looks_like_a_marker_is_text() -> None:
    lookalike = '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|end_of_msg|>'
    parts = [TOK.encode(lookalike), ids_of(ANSWER), TOK.encode(lookalike), ids_of(f"{C}response{S}{TAIL}")]
    parsed = whole([i for part in parts for i in part])
    assert parsed == Parsed(reasoning=lookalike, content=lookalike)


def test_tools_opened_before_think_is_closed_are_calls() -> None:
    parsed = whole("thoughts" + tools(call("f", arg("x", "number", "1"))) + TAIL)
    assert parsed.reasoning == "thoughts"
    assert parsed.content == ""
    assert args_of(parsed) == [{"x": 1}]


def test_response_opened_before_think_is_closed_ends_the_thinking() -> None:
    assert whole(f"a{O}response{S}b{C}response{S}{TAIL}") == Parsed(reasoning="a", content="b")


def test_a_skipped_think_channel_makes_the_reasoning_the_answer() -> None:
    events = stream(ids_of(f"Hello{C}response{S}{TAIL}"), [2])
    assert ReasoningWasContent("Hello") in events
    assert collect(events) == Parsed(reasoning=None, content="Hello")
    assert whole(f"{O}think{S}a{C}response{S}{TAIL}") == Parsed(reasoning="a", content="")


def test_an_echoed_prefix_is_no_text() -> None:
    text = f'{O}message role="assistant"{S}{O}think{S}a{ANSWER}b{C}response{S}{TAIL}'
    assert whole(text) == Parsed(reasoning="a", content="b")


def test_text_outside_of_channels_is_the_answer_and_white_space_is_nothing() -> None:
    assert whole(f"a{C}think{S}\n\n b c{TAIL}") == Parsed(reasoning="a", content="b c")
    assert whole(f"a{C}think{S}\n{O}response{S} b {C}response{S}\n{TAIL}") == Parsed(reasoning="a", content=" b ")


def test_no_white_space_comes_after_tool_calls_began() -> None:
    text = f"{ANSWER}before{C}response{S}" + tools(call("f")) + f"\n  {O}response{S}\n \n{C}response{S}\n{TAIL}"
    ids = ids_of(text)
    events = stream(ids, list(range(1, len(ids))))
    begin = events.index(ToolCallBegin(0, "f_0", "f"))
    assert not any(isinstance(e, ContentDelta) for e in events[begin:])
    assert whole(ids).content == "before"


@pytest.mark.parametrize(
    "bad",
    [
        f'{O}call index="1"{S}{arg("x", "string", "lost")}{C}call{S}',
        f'{O}call tool=""{S}{C}call{S}',
        f'{O}call tool="f" index="1"{O}argument key="x" type="string"{S}lost{C}argument{S}{C}call{S}',
        f"{arg('x', 'string', 'lost')} stray text {C}call{S}",
    ],
)
def test_a_malformed_call_costs_only_itself(bad: str) -> None:
    parsed = whole(f"{ANSWER}{C}response{S}" + tools(bad, call("good", arg("y", "number", "2"))) + TAIL)
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == [("good", {"y": 2})]
    assert parsed.content == ""


@pytest.mark.parametrize(
    "loose",
    [
        f'{O}call tool="f"{S}{O}argument key="x" type="string"{S}v{C}call{S}',
        f'{O}call tool="f"{S}{arg("x", "string", "v")}',
        f'{O}call tool="f"{S}{O}argument key="x" type="string"{S}v',
        f'{O}call tool="f"{S}{arg("x", "string", "v")}{O}argument type="string"{S}no key{C}argument{S}{C}call{S}',
    ],
)
def test_missing_closes_are_filled_in_and_the_next_call_is_whole(loose: str) -> None:
    parsed = whole(f"{ANSWER}{C}response{S}" + tools(loose, call("g", arg("y", "string", "w"))) + TAIL)
    assert [(c.id, json.loads(c.arguments)) for c in parsed.tool_calls] == [("f_0", {"x": "v"}), ("g_1", {"y": "w"})]
    assert all(c.is_whole for c in parsed.tool_calls)


def test_a_call_that_is_cut_off_stays_open() -> None:
    text = f'{ANSWER}{O}tools{S}{O}call tool="f"{S}{O}argument key="x" type="string"{S}abc'
    assert whole(text).tool_calls == (ParsedCall("f_0", "f", '{"x": "abc', False),)
    assert whole(text + END).tool_calls == (ParsedCall("f_0", "f", '{"x": "abc"}', True),)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("string", "1", "1"),
        ("number", " -2.5e3 ", -2500.0),
        ("boolean", "true", True),
        ("null", "null", None),
        ("object", '{"a": [1, {"b": "é"}]}', {"a": [1, {"b": "é"}]}),
        ("array", "[]", []),
        ("number", "twelve", "twelve"),
        ("object", '{"a": ', '{"a": '),
        ("number", "NaN", "NaN"),
        ("integer", "3", 3),
        ("number", "", ""),
    ],
)
def test_values_are_typed_and_what_is_no_json_is_a_string(kind: str, value: str, expected: object) -> None:
    assert args_of(whole(ANSWER + tools(call("f", arg("x", kind, value))))) == [{"x": expected}]


def test_a_json_block_gives_the_arguments_as_they_are() -> None:
    for raw in ('{"a": 1}', "{broken"):
        block = f'{O}json type="object"{S}{raw}{C}json{S}'
        assert whole(ANSWER + tools(call("f", block))).tool_calls[0].arguments == raw
    late = f'{O}json type="object"{S}{{"b": 2}}{C}json{S}'
    assert args_of(whole(ANSWER + tools(call("f", arg("a", "number", "1"), late)))) == [{"a": 1}]
    assert args_of(whole(ANSWER + tools(call("f", late, arg("a", "string", "1"))))) == [{"b": 2}]


def test_attributes_are_unescaped_and_need_not_be_ascii() -> None:
    text = ANSWER + tools(call("größe&amp;&quot;x&amp;quot;", arg("schlüssel 你&quot;", "string", "v")))
    parsed = whole(text)
    assert parsed.tool_calls[0].name == 'größe&"x&quot;'
    assert args_of(parsed) == [{'schlüssel 你"': "v"}]


def test_white_space_around_a_name_is_no_part_of_it() -> None:
    assert whole(ANSWER + tools(call(" f\n"))).tool_calls[0].id == "f_0"
    assert whole(ANSWER + tools(call("\n"), call("g"))).tool_calls == (ParsedCall("g_0", "g", "{}", True),)


def test_calls_are_dropped_where_no_tools_were_given() -> None:
    text = f"a{ANSWER}b{C}response{S}" + tools(call("f", arg("x", "string", "v"))) + TAIL
    assert whole(text, has_tools=False) == Parsed(reasoning="a", content="b")


def test_markers_that_fit_nowhere_stay_text_inside_a_channel_only() -> None:
    assert whole(f"a{O}b c{S}d{S}{ANSWER}e{C}f{S}{C}response{S}{O}g{S}{TAIL}") == Parsed(
        reasoning=f"a{O}b c{S}d{S}", content=f"e{C}f{S}"
    )
    inside = f'{O}call tool="f"{S}{O}argument key="x" type="string"{S}u{C}response{S}w{C}argument{S}{C}call{S}'
    assert args_of(whole(ANSWER + tools(inside))) == [{"x": f"u{C}response{S}w"}]


def test_a_stray_open_cannot_swallow_the_answer() -> None:
    text = "x" * 6000
    assert whole(f"{ANSWER}{O}{text}").content == f"{O}{text}"
    assert whole(f"{ANSWER}a{C}respo").content == "a"


def test_other_control_ids_are_hidden_and_nothing_comes_after_the_end() -> None:
    assert whole(f"a[BOS]<|media_pad|>b{ANSWER}c{C}response{S}{TAIL}d{ANSWER}e") == Parsed("ab", "c")
    assert whole(f"a{ANSWER}b[EOS]c") == Parsed("a", "b")


def test_half_a_character_at_the_end_comes_out_as_a_replacement() -> None:
    half = TOK.encode("😀")[:1]
    assert whole(ids_of(ANSWER) + half).content == "\ufffd"
    assert whole(half + ids_of(f"{ANSWER}x")) == Parsed("\ufffd", "x")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
names = st.text(min_size=1, max_size=8).filter(lambda name: name == name.strip())
calls = st.lists(st.tuples(names, st.dictionaries(st.text(max_size=6), json_values, max_size=4)), max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20), calls, st.booleans(), st.data())
def test_what_was_rendered_is_parsed_back(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], thinking: bool, data: st.DataObject
) -> None:
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    ids = encode_segments(completion_segments(normalise([message])[0], thinking=thinking), TOK)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    parsed = collect(stream(ids, cuts, thinking=thinking))
    assert parsed.content == content
    assert (parsed.reasoning or "") == (reasoning if thinking and reasoning.strip() else "")
    assert [(c.name, json.loads(c.arguments)) for c in parsed.tool_calls] == calls


FRAGMENTS = [O, C, S, END, "think", "response", "tools", 'call tool="f"', 'argument key="k" type="string"', "json"]
FRAGMENTS += ["message", "text ", "\n", "你", "[EOS]", "[BOS]", '{"a": 1}', "1", 'argument key="k" type="number"']


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=30), st.booleans(), st.booleans(), st.data())
def test_any_ids_in_any_cut_give_one_answer(
    pieces: list[str], thinking: bool, has_tools: bool, data: st.DataObject
) -> None:
    ids = [i for piece in pieces for i in ids_of(piece)]
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    parsed = collect(stream(ids, cuts, thinking=thinking, has_tools=has_tools))
    assert parsed == whole(ids, thinking=thinking, has_tools=has_tools)
    for c in parsed.tool_calls:
        if c.is_whole and not any(piece == "json" for piece in pieces):
            json.loads(c.arguments)
