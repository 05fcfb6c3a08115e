"""Every field of every body with every odd value: an answer or a complaint, never a bug."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baltoro.protocol.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from baltoro.server.generate import GenerateBody, GenerateParams
from baltoro.server.native import AbortBody
from tests.server.conftest import Lab

HI = [{"role": "user", "content": "hi"}]
ODD: list[Any] = [
    None, True, 0, -1, 2**31, 2**63, 2**64, 10**30, 0.5, -1e308, float("nan"), float("inf"), "", "x", "\x00", "日本🌍",
    [], [None], [[]], [0], ["x"], [{}], [10**30], {}, {"x": 1}, {"type": "x"}, {"type": "function", "function": {}},
    {"0": 1}, {"99999999999999999999": 1},
]  # fmt: skip
BODIES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}, list(ChatRequest.model_fields)),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}, list(CompletionRequest.model_fields)),
    ("/v1/tokenize", {"prompt": "a"}, list(TokenizeRequest.model_fields)),
    ("/v1/detokenize", {"tokens": [1]}, list(DetokenizeRequest.model_fields)),
    ("/generate", {"text": "a"}, [f.name for f in msgspec.structs.fields(GenerateBody)]),
    ("/abort_request", {"rid": "x"}, [f.name for f in msgspec.structs.fields(AbortBody)]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "good", "fields"), BODIES, ids=[path for path, _, _ in BODIES])
async def test_no_field_with_any_value_is_a_bug(lab: Lab, path: str, good: dict[str, Any], fields: list[str]) -> None:
    for field in fields:
        for value in ODD:
            if isinstance(value, list) and field == "messages":
                value = [*value, *HI]
            await check(lab, path, good | {field: value})


@pytest.mark.slow
async def test_no_sampling_param_with_any_value_is_a_bug(lab: Lab) -> None:
    for field in msgspec.structs.fields(GenerateParams):
        for value in ODD:
            await check(lab, "/generate", {"text": "a", "sampling_params": {field.name: value}})


@pytest.mark.slow
@pytest.mark.parametrize("field", ["content", "name", "role", "tool_call_id", "tool_calls", "tools", "reasoning"])
async def test_no_field_of_a_message_with_any_value_is_a_bug(lab: Lab, field: str) -> None:
    for role in ("user", "system", "assistant", "tool"):
        for value in [*ODD, [{"id": "a", "function": {"name": "f", "arguments": "{"}}], [{"type": "image_url"}]]:
            await check(lab, "/v1/chat/completions", {"messages": [*HI, {"role": role, field: value}]})


async def check(lab: Lab, path: str, body: dict[str, Any]) -> None:
    reply = await lab.http.post(path, content=json.dumps(body).encode())
    assert reply.status_code < 500, (body, reply.text)
    if reply.status_code >= 400:
        error = reply.json()["error"]
        assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error"), body
