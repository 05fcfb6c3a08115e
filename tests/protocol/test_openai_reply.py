from __future__ import annotations

import json

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from baltoro.protocol import openai_reply as reply


def test_absent_is_absent_and_the_finish_reason_is_null() -> None:
    choice = reply.ChunkChoice(index=0, delta=reply.Delta(content="a"))
    chunk = json.loads(reply.to_json(reply.ChatChunk(id="i", created=1, model="m", choices=[choice])))
    assert chunk["choices"] == [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]
    assert "usage" not in chunk


def test_the_official_client_reads_what_we_write() -> None:
    call = reply.ToolCallOut(id="f_0", type="function", function=reply.FunctionOut("{}", "f"))
    message = reply.MessageOut(content=None, reasoning_content="hm", tool_calls=[call])
    choice = reply.ChatChoice(index=0, message=message, finish_reason="tool_calls")
    whole = reply.ChatCompletion(id="i", created=1, model="m", choices=[choice], usage=reply.usage(3, 4, cached=1))
    read = ChatCompletion.model_validate_json(reply.to_json(whole), strict=True)
    assert read.usage is not None and read.usage.total_tokens == 7
    assert read.choices[0].message.tool_calls[0].function.name == "f"  # type: ignore[index, union-attr]

    first = reply.ToolCallOut(index=0, function=reply.FunctionOut("{"))
    chunk = reply.ChatChunk(
        id="i", created=1, model="m", choices=[reply.ChunkChoice(index=0, delta=reply.Delta(tool_calls=[first]))]
    )
    assert ChatCompletionChunk.model_validate_json(reply.to_json(chunk), strict=True).choices[0].delta.tool_calls

    text = reply.TextCompletion(
        id="i", created=1, model="m", choices=[reply.TextChoice(index=0, text="x", finish_reason="stop")]
    )
    assert Completion.model_validate_json(reply.to_json(text), strict=True).choices[0].text == "x"
