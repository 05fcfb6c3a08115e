"""What clients send is evened out, and what cannot be used is refused by its name."""

from __future__ import annotations

import copy

import pytest

from baltoro.chat.messages import ChatOptions, chat_options, in_call_order, normalise, normalise_tools, response_schema
from baltoro.errors import RequestError

CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_null_content_developer_and_reasoning_are_evened_out() -> None:
    given = [
        {"role": "developer", "content": "be brief", "name": None, "audio": None},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c0", "content": [{"type": "text", "text": "2"}]},
    ]
    before = copy.deepcopy(given)
    out = normalise(given)
    assert given == before
    assert out[0] == {"role": "system", "content": "be brief"}
    assert out[1]["content"] == ""
    assert out[1]["reasoning_content"] == "hm"
    assert out[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert normalise(out) == out


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "video"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0].image_url"),
        ({"role": "user", "content": "x", "name": 3}, "messages[1].name"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [3]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "system", "content": "x", "tools": [CALL]}, "messages[1].tools"),
        ({"role": "user", "content": "", "tools": [CALL]}, "messages[1].tools"),
        ({"role": "system", "content": None, "tools": [{"function": {}}]}, "messages[1].tools[0].function.name"),
    ],
)
def test_errors_name_the_field(message: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalise([{"role": "user", "content": "ok"}, message])
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize("messages", [None, [], "hi", 3, {"role": "user"}])
def test_a_conversation_must_be_a_list_with_messages(messages: object) -> None:
    with pytest.raises(RequestError) as caught:
        normalise(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("effort", "kwargs", "expected"),
    [
        (None, None, ChatOptions(True, "max")),
        ("low", None, ChatOptions(True, "low")),
        ("none", None, ChatOptions(False, None)),
        ("high", {"thinking": False}, ChatOptions(False, None)),
        (None, {"enable_thinking": False}, ChatOptions(False, None)),
        (None, {"thinking_effort": "high"}, ChatOptions(True, "high")),
        ("low", {"thinking_effort": "high", "thinking": True}, ChatOptions(True, "low")),
    ],
)
def test_effort_and_template_kwargs_decide_the_thinking(
    effort: object, kwargs: dict[str, object] | None, expected: ChatOptions
) -> None:
    assert chat_options(effort, kwargs) == expected


def test_default_effort_can_be_off_and_bad_values_are_refused() -> None:
    assert chat_options(default_effort=None) == ChatOptions(True, None)
    for effort, kwargs, param in (
        ("medium", None, "reasoning_effort"),
        (3, None, "reasoning_effort"),
        (None, {"thinking_effort": "x"}, "chat_template_kwargs.thinking_effort"),
        (None, {"thinking": "yes"}, "chat_template_kwargs.thinking"),
    ):
        with pytest.raises(RequestError) as caught:
            chat_options(effort, kwargs)
        assert caught.value.param == param


def test_tools_must_have_names() -> None:
    assert normalise_tools(None) == []
    for bad in ({}, [3], [{"type": "function"}], [{"type": "function", "function": {"name": ""}}]):
        with pytest.raises(RequestError, match="tools"):
            normalise_tools(bad)


def test_response_formats_are_told_apart() -> None:
    schema = {"type": "object"}
    assert response_schema(None) is None
    assert response_schema({"type": "json_object"}) is None
    assert response_schema({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}) == schema
    for bad, param in (
        ({"type": "yaml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": True}}, "response_format.json_schema.schema"),
    ):
        with pytest.raises(RequestError) as caught:
            response_schema(bad)
        assert caught.value.param == param


def test_tool_results_follow_the_order_of_the_calls() -> None:
    def call(name: str, call_id: str) -> dict[str, object]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}

    def result(call_id: str, **more: str) -> dict[str, str]:
        return {"role": "tool", "tool_call_id": call_id, "content": call_id, **more}

    asked = {"role": "assistant", "content": "", "tool_calls": [call("f", "x"), call("g", "y"), call("h", "x")]}
    out = in_call_order([asked, result("y", tool="stale"), result("x")])
    assert [(m["content"], m["tool"]) for m in out[1:]] == [("x", "f"), ("y", "g")]  # the first of two equal ids counts
    left = [asked, result("y"), result("unknown"), result("x")]
    assert in_call_order(left) == left
    two_runs = in_call_order([asked, result("y"), {"role": "user", "content": "?"}, result("x")])
    assert [m["content"] for m in two_runs[1:]] == ["y", "?", "x"]
    assert in_call_order([result("x")]) == [result("x")]
