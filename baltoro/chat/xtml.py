"""Messages -> ids, in K3's chat protocol (XTML): tags, channels, options and the prefix of the answer.

In: OpenAI-style messages, tools, options. Out: segments (text, allow_special) or, tokenised one by one, ids.
    <|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>
    <|open|>message role="assistant"<|sep|><|open|>think<|sep|>
Invariants: only what this file writes itself is allow-special, so no text of a user, tool or model can become a control
id; segment borders are token borders, so a conversation that grows keeps the ids it had (up to the one-shot options).
Limit: an answer cannot be continued; every prompt opens a new assistant message.
Source: K3's `encoding_k3` (segments, order of messages, wording of the options).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from baltoro.chat.messages import (
    Json,
    check_effort,
    format_type,
    in_call_order,
    normalise,
    normalise_tools,
    response_schema,
)
from baltoro.chat.segments import Segment, Writer, encode_segments
from baltoro.chat.tokenizer import Tokenizer
from baltoro.errors import RequestError

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_NEW_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids with one media pad for each picture, and the pictures in order."""

    ids: list[int]
    images: tuple[Image.Image, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What goes into the prompt beside the messages. Errors: RequestError names the option that cannot be used."""

    tools: object = None
    thinking: bool = True
    effort: str | None = None
    tool_choice: object = None
    response_format: object = None

    def __post_init__(self) -> None:
        normalise_tools(self.tools)
        check_effort(self.effort)
        choice = self.tool_choice
        if choice is not None and not isinstance(choice, dict) and choice not in ("auto", "none", "required"):
            raise RequestError(
                f"tool_choice must be auto, none, required or name a function, not {choice!r}", param="tool_choice"
            )
        response_schema(self.response_format)


def render(
    messages: object,
    *,
    tokenizer: Tokenizer,
    tools: object = None,
    thinking: bool = True,
    effort: str | None = None,
    tool_choice: object = None,
    response_format: object = None,
    images: Sequence[Image.Image] = (),
) -> Prompt:
    """The prompt of an answer to `messages` (which are checked and normalised first).

    `images` fill `<|kimi_image_placeholder|>` in strings, in order; without them that text is plain text.
    Errors: RequestError names the field at fault.
    """
    options = Options(
        tools=tools, thinking=thinking, effort=effort, tool_choice=tool_choice, response_format=response_format
    )
    pictures: list[Image.Image] = []
    parts = segments(normalise(messages), options, images=images, pictures=pictures)
    return Prompt(ids=encode_segments(parts, tokenizer), images=tuple(pictures))


def segments(
    messages: Sequence[Json],
    options: Options | None = None,
    *,
    has_prefix: bool = True,
    images: Sequence[Image.Image] = (),
    pictures: list[Image.Image] | None = None,
) -> list[Segment]:
    """Segments of normalised messages. Roles that K3 does not know are left out.

    `has_prefix`: open the answer at the end. `pictures` is written: the pictures in the order of their pads.
    """
    options = options or Options()
    writer = Writer(images)
    if tools := normalise_tools(options.tools):
        writer.option("tool-declare", _TOOLS + _fence(tools))
    if options.thinking and options.effort is not None:
        writer.option("thinking-effort", _EFFORT.format(options.effort))
    _write_messages(writer, in_call_order(messages), options.thinking)
    if isinstance(options.tool_choice, str) and options.tool_choice in _TOOL_CHOICE:
        writer.option("tool-choice", _TOOL_CHOICE[options.tool_choice])
    if (kind := format_type(options.response_format)) in ("json_object", "json_schema"):
        schema = response_schema(options.response_format)
        body = _FORMAT.format(kind)
        writer.option("response-format", body if schema is None else body + _SCHEMA + _fence(schema))
    if has_prefix:
        writer.open("message", role="assistant")
        writer.open("think" if options.thinking else "response")
    writer.finish()
    if pictures is not None:
        pictures.extend(writer.pictures)
    return writer.segments


def completion_segments(message: Json, *, thinking: bool = True) -> list[Segment]:
    """What the model is to say after the prompt so that the answer is `message` (normalised): a target to train on."""
    writer = Writer(())
    _write_body(writer, message, thinking, "messages[-1]")
    writer.end_message()
    return writer.segments[3:]  # without the opening of its first channel, which the prompt holds


def _write_messages(writer: Writer, messages: Sequence[Json], thinking: bool) -> None:
    calls: Sequence[Json] = ()
    num_results = 0
    for i, message in enumerate(messages):
        role, param = message["role"], f"messages[{i}]"
        named = {"name": message["name"]} if message.get("name") else {}
        if role == "assistant":
            calls, num_results = message.get("tool_calls", ()), 0
            writer.open("message", role=role, **named)
            _write_body(writer, message, thinking, param)
        elif role == "system" and message.get("tools"):
            writer.option("tool-declare", _NEW_TOOLS + _fence(message["tools"]))
            continue
        elif role in ("system", "user"):
            writer.open("message", role=role, **named)
            writer.content(message["content"], f"{param}.content")
        elif role == "tool":
            num_results += 1
            tool = message.get("tool") or message.get("name") or _called(calls, num_results, param)
            writer.open("message", role=role, tool=tool, index=str(num_results))
            writer.content(message["content"], f"{param}.content")
        else:
            continue
        writer.end_message()


def _called(calls: Sequence[Json], number: int, param: str) -> str:
    """Name of the `number`-th call (from 1) of the last assistant message."""
    if number > len(calls):
        raise RequestError(
            f"{param} answers no call: give tool_call_id of a call in the assistant message before it, or name.",
            param=f"{param}.tool_call_id",
        )
    name: str = calls[number - 1]["function"]["name"]
    return name


def _write_body(writer: Writer, message: Json, thinking: bool, param: str) -> None:
    """The channels of an assistant message. The think channel is there in thinking mode even when it is empty."""
    if thinking:
        writer.open("think")
        reasoning = message.get("reasoning_content", "")
        writer.string(reasoning if reasoning.strip() else "")
        writer.close("think")
    writer.open("response")
    writer.content(message["content"], f"{param}.content")
    writer.close("response")
    if calls := message.get("tool_calls"):
        writer.open("tools")
        for number, call in enumerate(calls, start=1):
            _write_call(writer, call["function"], number)
        writer.close("tools")


def _write_call(writer: Writer, function: Json, number: int) -> None:
    writer.open("call", tool=function["name"], index=str(number))
    arguments = function["arguments"]
    if isinstance(arguments, str):
        writer.open("json", type="object")
        writer.string(arguments)
        writer.close("json")
    else:
        for key, value in arguments.items():
            writer.open("argument", key=key, type=type_word(value))
            writer.string(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            writer.close("argument")
    writer.close("call")


def type_word(value: object) -> str:
    """K3's word for the type of an argument."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, dict) else "array"


def _fence(value: object) -> str:
    """A json fence around the compact form with all keys sorted."""
    return f"```json\n{json.dumps(_sorted(value), ensure_ascii=False, separators=(',', ':'))}\n```"


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
