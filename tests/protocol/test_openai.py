from __future__ import annotations

import json
from typing import Any

import pytest

from baltoro.errors import RequestError
from baltoro.protocol.openai import ChatRequest, CompletionRequest, parse

HI = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": [HI], **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [HI, {"role": "wizard", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"n": True}, "n"),
        ({"stop": [1]}, "stop[0]"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking"),
        ({"logit_bias": {"5": "a"}}, "logit_bias.5"),
    ],
)
def test_a_wrong_value_is_named_by_its_param(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"\xff", b'{"messages": null}', b"{}"])
def test_a_body_that_is_no_request_is_a_request_error(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse(ChatRequest, body)


def test_unknown_fields_and_nulls_are_ignored() -> None:
    body = chat(temperature=None, frobnicate={"a": 1}, metadata={"b": "c"})
    assert body.temperature is None
    assert not hasattr(body, "frobnicate")


def test_tools_stay_as_they_came() -> None:
    tool = {"type": "function", "x": None, "function": {"strict": None, "name": "f", "parameters": {"é": [1.0]}}}
    assert chat(tools=[tool]).tools == [tool]


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_a_completion_prompt_has_four_forms(prompt: Any) -> None:
    assert parse(CompletionRequest, json.dumps({"prompt": prompt}).encode()).prompt == prompt
