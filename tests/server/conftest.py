"""A server without a model: the real application and worker client, a scripted engine, HTTP in the same event loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from baltoro.chat.tokenizer import Tokenizer
from baltoro.protocol import sse
from baltoro.protocol.worker import Submit
from baltoro.server.app import create_app
from baltoro.server.client import WorkerClient
from baltoro.server.config import ServerConfig
from tests.server.fake import FakeEngine, Reply

# Every byte, and some longer tokens: words of the protocol, and pieces that straddle borders of stop strings.
_LONGER = [b"think", b"response", b"message", b"tools", b"call", b"argument", b"lo w", "ü".encode(), b"END"]
TOKENIZER = Tokenizer({**{bytes([b]): b for b in range(256)}, **{t: 256 + i for i, t in enumerate(_LONGER)}})


@dataclass
class Lab:
    """What a test turns: `say` sets the ids of every answer, `script` all of it."""

    engine: FakeEngine
    worker: WorkerClient
    app: FastAPI
    http: httpx.AsyncClient
    tokenizer: Tokenizer

    def say(self, text: str, *, per_step: int = 1, is_ended: bool = True, **fields: Any) -> list[int]:
        """The engine will answer with `text` (control names count), and end of message unless told otherwise."""
        ids = self.tokenizer.encode(text, allow_special=True)
        if is_ended:
            end = self.tokenizer.eos_ids[0]
            ids = [*ids, end]
            fields = {"num_trimmed": 1, "stop_reason": end} | fields
        steps = [ids[i : i + per_step] for i in range(0, len(ids), per_step)] or [[]]
        self.engine.script = lambda _request, _index: Reply(steps, **fields)
        return ids

    @property
    def submit(self) -> Submit:
        """The last request the engine was given."""
        return self.engine.submits[-1]

    async def post(self, path: str, body: Any) -> Any:
        """The JSON of a reply that must be 200."""
        reply = await self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def error(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error object of a reply that must be none."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await self.http.post(path, content=content)
        assert reply.status_code >= 400, reply.text
        assert set(reply.json()) == {"error"}
        error: dict[str, Any] = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return reply.status_code, error

    async def events(self, path: str, body: Any) -> list[Any]:
        """The events of a streamed reply; the last must be [DONE]."""
        reply = await self.http.post(path, json=body | {"stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith(sse.MEDIA_TYPE)
        *events, done = sse.Decoder().push(reply.content)
        assert done == sse.DONE_DATA
        return [json.loads(event) for event in events]


MakeLab = Callable[..., Any]


@pytest.fixture
async def make_lab(tmp_path: Path) -> AsyncIterator[MakeLab]:
    """Builds labs; `make_lab(api_key="k")` changes the settings of one."""
    async with AsyncExitStack() as stack:

        async def make(*, adapters: dict[str, dict[str, Any]] | None = None, **settings: Any) -> Lab:
            address = f"ipc://{tmp_path}/engine"
            fields = {"model_name": "tiny", "max_context_tokens": 4096, "call_timeout_s": 0.3} | settings
            config = ServerConfig(**fields)
            worker = WorkerClient(address, call_timeout_s=0.3)
            stack.callback(worker.close)
            engine = FakeEngine(address, lambda _request, _index: Reply([[104], [105]]), adapters=adapters or {})
            worker.start()
            engine.start()
            stack.callback(engine.close)
            await worker.ready()
            app = create_app(config, worker, TOKENIZER)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://lab"))
            return Lab(engine, worker, app, http, TOKENIZER)

        yield make


@pytest.fixture
async def lab(make_lab: MakeLab) -> Lab:
    """A lab with usual settings."""
    made: Lab = await make_lab()
    return made
