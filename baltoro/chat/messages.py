"""Checks and evens out what a client calls a conversation, before it is rendered.

In: OpenAI-style messages, tools and options, as parsed JSON. Out: plain dicts in the same shape, in one spelling:
`role` is system, user, assistant or tool; `content` is a string or a list of text and image parts; a tool call is
`{"id", "type", "function": {"name", "arguments"}}` with `arguments` a dict, or a string that is no JSON.
Invariants: pure; the input is not written; what comes out passes through unchanged; every RequestError names the field
at fault (`messages[3].content`). Fields that we do not know are dropped: clients send many.
Source: OpenAI's chat API; what servers of K3 owe the renderer (null content, `developer`, effort `none`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from baltoro.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("low", "high", "max")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How the answer is to be thought out: `effort` is None where thinking is off or nothing was asked."""

    thinking: bool
    effort: str | None


def chat_options(
    reasoning_effort: object = None,
    template_kwargs: Mapping[str, object] | None = None,
    *,
    default_effort: str | None = "max",
) -> ChatOptions:
    """Merge `reasoning_effort` with `chat_template_kwargs` (`thinking` or `enable_thinking`, `thinking_effort`).

    Effort "none" means that thinking is off. Errors: RequestError names the field.
    """
    kwargs = template_kwargs or {}
    thinking = True
    for key in ("enable_thinking", "thinking"):
        value = kwargs.get(key)
        if value is not None and not isinstance(value, bool):
            raise _bad(f"chat_template_kwargs.{key}", "must be true or false")
        thinking = thinking if value is None else value
    param = "reasoning_effort"
    effort = reasoning_effort
    if effort is None and "thinking_effort" in kwargs:
        param, effort = "chat_template_kwargs.thinking_effort", kwargs["thinking_effort"]
    if effort == "none" or not thinking:
        return ChatOptions(thinking=False, effort=None)
    return ChatOptions(thinking=True, effort=check_effort(default_effort if effort is None else effort, param))


def check_effort(effort: object, param: str = "reasoning_effort") -> str | None:
    """`effort` if K3 knows it. Errors: RequestError."""
    if effort is None or (isinstance(effort, str) and effort in EFFORTS):
        return effort
    raise _bad(param, f"must be one of {', '.join(EFFORTS)} (or none), not {effort!r}")


def normalise(messages: object) -> list[Json]:
    """Check a conversation and bring it into one spelling. Errors: RequestError names the field."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise _bad("messages", "must be a list with at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def normalise_tools(tools: object, param: str = "tools") -> list[Json]:
    """Check a list of OpenAI-style tools; None is no tools. Nothing is dropped: K3 is shown the whole list."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise _bad(param, "must be a list of {'type': 'function', 'function': {...}}")
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise _bad(f"{param}[{i}].function.name", "must be a non-empty string")
    return list(tools)


def format_type(response_format: object) -> object:
    """The word for the kind of answer that is asked for, None if nothing is."""
    return response_format.get("type") if isinstance(response_format, Mapping) else response_format


def response_schema(response_format: object) -> Json | None:
    """The schema of a json_schema response format, None for the others.

    Errors: RequestError if it is none of text, json_object, json_schema, or the schema is missing.
    """
    kind = format_type(response_format)
    if kind not in (None, "text", "json_object", "json_schema"):
        raise RequestError(
            f"response_format.type must be text, json_object or json_schema, not {kind!r}",
            param="response_format.type",
        )
    if kind != "json_schema":
        return None
    wrapped = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
    if not isinstance(schema, dict):
        raise RequestError(
            "response_format.json_schema.schema must be a JSON schema object",
            param="response_format.json_schema.schema",
        )
    return schema


def in_call_order(messages: Sequence[Json]) -> list[Json]:
    """Sort each run of tool results into the order of the calls they answer, and name them after those calls.

    A run is left alone unless every result names (by `tool_call_id`) a call of the last assistant message.
    """
    out: list[Json] = []
    calls: dict[object, tuple[int, str]] = {}
    run: list[Json] = []
    for message in [*messages, {"role": ""}]:
        if message["role"] == "tool":
            run.append(message)
            continue
        if all(m.get("tool_call_id") in calls for m in run):
            run = [m | {"tool": calls[m["tool_call_id"]][1]} for m in run]
            run.sort(key=lambda m: calls[m["tool_call_id"]][0])
        out += run
        run = []
        if message["role"] == "assistant":
            calls = {}
            for place, call in enumerate(message.get("tool_calls", ())):
                if "id" in call:
                    calls.setdefault(call["id"], (place, call["function"]["name"]))
        out.append(message)
    return out[:-1]


def _bad(param: str, advice: str) -> RequestError:
    return RequestError(f"{param} {advice}", param=param)


def _message(message: object, param: str) -> Json:
    if not isinstance(message, Mapping):
        raise _bad(param, "must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise _bad(f"{param}.role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    out: Json = {"role": "system" if role == "developer" else role}
    out["content"] = _content(message.get("content"), f"{param}.content")
    for key in ("name", "tool", "tool_call_id") if role == "tool" else ("name",):
        if value := _text(message.get(key), f"{param}.{key}"):
            out[key] = value
    if role == "assistant":
        _assistant(message, out, param)
    if tools := message.get("tools"):
        if out["role"] != "system" or out["content"]:
            raise _bad(f"{param}.tools", "may only stand in a system message without content")
        out["tools"] = normalise_tools(tools, f"{param}.tools")
    return out


def _assistant(message: Mapping[str, Any], out: Json, param: str) -> None:
    key = "reasoning_content" if message.get("reasoning_content") else "reasoning"
    if reasoning := _text(message.get(key), f"{param}.{key}"):
        out["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _bad(f"{param}.tool_calls", "must be a list")
    if calls:
        out["tool_calls"] = [_tool_call(call, f"{param}.tool_calls[{j}]") for j, call in enumerate(calls)]


def _tool_call(call: object, param: str) -> Json:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _bad(param, "must be an object with id and function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _bad(f"{param}.function.name", "must be a non-empty string")
    arguments = _arguments(function.get("arguments"), f"{param}.function.arguments")
    out: Json = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call_id := _text(call.get("id"), f"{param}.id"):
        out["id"] = call_id
    return out


def _arguments(arguments: object, param: str) -> Json | str:
    """A dict; a string that is no JSON stays one and is shown to the model as it is."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    if not isinstance(value, dict):
        raise _bad(param, "must be a JSON object")
    return value


def _text(value: object, param: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _bad(param, "must be a string")
    return value


def _content(content: object, param: str) -> str | list[Json]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _bad(param, "must be a string, a list of parts or null")
    return [_part(part, f"{param}[{j}]") for j, part in enumerate(content)]


def _part(part: object, param: str) -> Json:
    """{"type": "text", "text"} or {"type": "image", "image": data URL, bytes or PIL image}."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text":
        if not isinstance(part.get("text"), str):
            raise _bad(f"{param}.text", "must be a string")
        return {"type": "text", "text": part["text"]}
    if isinstance(part, Mapping) and kind in ("image", "image_url"):
        image = part.get("image", part.get("image_url"))
        image = image.get("url") if isinstance(image, Mapping) else image
        if not isinstance(image, str | bytes | Image.Image):
            raise _bad(f"{param}.{kind}", "must hold the picture as a data URL: {'url': 'data:image/png;base64,...'}")
        return {"type": "image", "image": image}
    raise _bad(f"{param}.type", f"must be text or image_url, not {kind!r}")
