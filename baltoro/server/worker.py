"""What the handlers know of an engine: a Worker that takes requests, and the stream of deltas that comes back.

In: Submits. Out: TokenDeltas in order, or WorkerLost. The one over a socket is `client.py`.
Invariants: every stream ends - finished, failed, or closed by its reader, which aborts the request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from baltoro.errors import WorkerLost
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.worker import Submit


class DeltaStream:
    """The deltas of one or several requests, in order, until each completion has ended.

    A context manager: leaving it early aborts what still runs. Single writer: the client it came from.
    """

    def __init__(
        self, requests: Sequence[Submit], *, forget: Callable[[str], None], abort: Callable[[str], None]
    ) -> None:
        """`forget`: no more deltas of a request are wanted here; `abort`: it is to end."""
        self._left = {request.request_id: request.n for request in requests}
        self._forget, self._abort = forget, abort
        self._ready: deque[TokenDelta] = deque()
        self._error: WorkerLost | None = None
        self._news = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        """The next delta. Errors: WorkerLost when the engine is gone before everything has ended."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if not self._left:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._ready.popleft()

    def feed(self, delta: TokenDelta) -> None:
        """Add a delta that came from the engine."""
        self._ready.append(delta)
        if delta.finish_reason is not None:
            self._left[delta.request_id] -= 1
            if self._left[delta.request_id] == 0:
                del self._left[delta.request_id]
                self._forget(delta.request_id)
        self._news.set()

    def fail(self, error: WorkerLost) -> None:
        """End with an error, after the deltas that are already here."""
        self._error = error
        self._news.set()

    def close(self) -> None:
        """No more is wanted: abort what still runs. Safe to call twice."""
        left, self._left = self._left, {}
        for request_id in left:
            self._forget(request_id)
            self._abort(request_id)
        self._news.set()


class Worker(Protocol):
    """What the handlers need of an engine."""

    @property
    def failure(self) -> str | None:
        """Why the engine is lost; None while it is not."""

    @property
    def info(self) -> Mapping[str, Any]:
        """What the engine said of itself when it was ready."""

    @property
    def running(self) -> Sequence[str]:
        """Ids of the requests that have not ended."""

    def submit(self, requests: Sequence[Submit]) -> DeltaStream:
        """Start requests whose deltas come in one stream. Errors: WorkerLost; RequestError when an id is in use."""

    def abort(self, request_id: str) -> None:
        """End a request, as if it had stopped itself with reason abort; an empty id ends all."""

    async def query(self) -> dict[str, Any]:
        """The engine's numbers."""

    async def flush(self) -> None:
        """Forget cached prefixes. Errors: RequestError with the engine's reason when it cannot."""

    async def load_adapter(
        self, name: str, *, path: str | None = None, tensors: bytes = b"", config: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Load an adapter; facts of all adapters by name. Errors: RequestError with the engine's reason."""

    async def unload_adapter(self, name: str) -> dict[str, Any]:
        """Returns when its last request has ended; facts as above. Errors: RequestError."""
