"""What every route shares: bodies with a limit, the key, and work that ends when the client goes away.

In: ASGI requests. Out: body bytes, JSON replies, event streams.
Invariants: no more than the limit is ever held; a closed connection cancels the work, streamed or not, whatever it
waits for.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from baltoro.errors import BaltoroError
from baltoro.protocol import sse
from baltoro.protocol.openai_reply import to_json
from baltoro.server.errors import BodyTooLarge, ClientGone, Unauthorized, error_body

T = TypeVar("T")

SCHEMA_REF = "#/components/schemas/{model}"


def takes(kind: type[Any]) -> dict[str, Any]:
    """What the API's own description says of a route that reads its body itself."""
    schema = {"$ref": SCHEMA_REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Errors: BodyTooLarge as soon as it is known."""
    advice = f"the body is larger than {limit_bytes} bytes; send less, or start the server with a larger --max-body"
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLarge(advice)
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit_bytes:
            raise BodyTooLarge(advice)
        pieces.append(piece)
    return b"".join(pieces)


def check_key(request: Request, api_key: str | None) -> None:
    """Errors: Unauthorized unless the request carries the key (`Authorization: Bearer`, or `x-api-key`)."""
    if api_key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    if not hmac.compare_digest(given.strip().encode(), api_key.encode()):
        raise Unauthorized("wrong or missing API key; send it as `Authorization: Bearer KEY`", code="invalid_api_key")


def json_reply(value: Any, headers: dict[str, str] | None = None) -> Response:
    """200 with JSON."""
    return Response(to_json(value), 200, headers, media_type="application/json")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled when the client leaves. The body must have been read.

    Errors: ClientGone.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client closed the connection")
        return task.result()
    finally:
        await _end(task, watcher)


async def first_of(events: AsyncGenerator[bytes, None]) -> bytes:
    """The first event. What fails before it is still an ordinary error reply."""
    return await anext(events)


class EventStream(Response):
    """A reply of server-sent events: the first, which is here already, and those that `events` still brings.

    The generator is closed when it ends or when the client leaves. An error after the start becomes an event.
    """

    media_type = sse.MEDIA_TYPE

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            await _end(writer, watcher)
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except BaltoroError as error:
            event = sse.encode(to_json(error_body(error)))
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
