"""Clients that leave, over a real socket: the in-memory transport of the other tests cannot hang up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.server.conftest import Lab
from tests.server.live import listening

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def port(lab: Lab) -> AsyncIterator[int]:
    async with listening(lab.app) as port:
        yield port


async def connect(port: int, path: str, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stall_at", [0, 4])
async def test_a_client_that_leaves_ends_its_request(
    lab: Lab, port: int, path: str, stream: bool, stall_at: int
) -> None:
    lab.say("abcdefgh", stall_at=stall_at)
    body = CHAT if "chat" in path else {"prompt": "a"} if "v1" in path else {"text": "a"}
    reader, writer = await connect(port, path, {**body, "stream": stream})
    await lab.engine.until(lambda: len(lab.engine.submits) == 1)
    if stream and stall_at:
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"data: "), 5)
    writer.close()
    await lab.engine.until(lambda: len(lab.engine.aborted) == 1)
    assert lab.engine.aborted == [lab.submit.request_id]
    assert lab.worker.running == ()


async def test_one_that_leaves_does_not_end_the_others(lab: Lab, port: int) -> None:
    lab.say("abcdefgh", stall_at=4)
    streams = [
        await connect(port, "/v1/completions", {"prompt": "a", "stream": True, "rid": f"r{i}"}) for i in range(4)
    ]
    await lab.engine.until(lambda: len(lab.engine.submits) == 4)
    streams[2][1].close()
    await lab.engine.until(lambda: bool(lab.engine.aborted))
    assert lab.engine.aborted == ["r2"]
    assert sorted(lab.worker.running) == ["r0", "r1", "r3"]
    for _, writer in streams:
        writer.close()
    await lab.engine.until(lambda: len(lab.engine.aborted) == 4)
