"""The server's end of the Worker contract: submit, abort, ask; streams of deltas come back.

In: `protocol.worker` messages for one engine process. Out: `DeltaStream`s, answers to calls, or WorkerLost.
Transport: this end binds a ROUTER socket, the engine connects a DEALER and says Hello; each message is one frame of
msgpack. The engine's identity is learnt from its Hello.
Invariants: every stream ends - finished, failed, or closed by its reader, which aborts the request; once the engine is
lost, everybody who waits and everybody who comes later gets WorkerLost with the reason.
Not here: starting or watching the process (`cli.serve`), which calls `lose` when it ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from baltoro.errors import InvariantError, RequestError, WorkerLost
from baltoro.observe import log, logger
from baltoro.protocol.worker import (
    WIRE_VERSION,
    Abort,
    Ack,
    Deltas,
    Dying,
    Flush,
    FromEngine,
    Hello,
    LoadAdapter,
    Query,
    Shutdown,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from baltoro.server.worker import DeltaStream

LOAD_TIMEOUT_S = 600.0
"""How long an adapter may take to be read and checked."""


class WorkerClient:
    """A `Worker` over a socket. Lives in one event loop; `start` before use, `close` at the end."""

    def __init__(self, address: str, *, call_timeout_s: float = 30.0) -> None:
        """Bind `address` (ipc:// or tcp://127.0.0.1). The engine may connect before or after `start`."""
        self._info: dict[str, Any] = {}
        self._failure: str | None = None
        self._call_timeout_s = call_timeout_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._engine = b""
        self._hello = asyncio.Event()
        self._streams: dict[str, DeltaStream] = {}
        self._calls: dict[str, asyncio.Future[Ack]] = {}
        self._call_ids = (f"call-{n}" for n in itertools.count())
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._reader: asyncio.Task[None] | None = None

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def info(self) -> Mapping[str, Any]:
        return self._info

    @property
    def running(self) -> Sequence[str]:
        return tuple(self._streams)

    def start(self) -> None:
        """Begin to read. Called inside the event loop."""
        self._reader = asyncio.create_task(self._read(), name="worker-reader")

    async def ready(self) -> Mapping[str, Any]:
        """Wait for the engine's Hello; its info. Errors: WorkerLost if the engine is lost first."""
        await self._hello.wait()
        self._check()
        return self._info

    def submit(self, requests: Sequence[Submit]) -> DeltaStream:
        self._check()
        stream = DeltaStream(requests, forget=self.forget, abort=self.abort)
        for request in requests:
            if request.request_id in self._streams:
                raise RequestError(f"a request with id {request.request_id} is running; choose another", param="rid")
        for request in requests:
            self._streams[request.request_id] = stream
            self._send(request)
        return stream

    def abort(self, request_id: str) -> None:
        if self._failure is None:
            self._send(Abort(request_id))

    async def query(self) -> dict[str, Any]:
        return (await self._call(Query(next(self._call_ids)))).info

    async def flush(self) -> None:
        ack = await self._call(Flush(next(self._call_ids)))
        if ack.error is not None:
            raise RequestError(f"the cache cannot be flushed now: {ack.error}")

    async def load_adapter(
        self, name: str, *, path: str | None = None, tensors: bytes = b"", config: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        call = LoadAdapter(
            call_id=next(self._call_ids), name=name, path=path, tensors=tensors, config=dict(config or {})
        )
        return _adapters(await self._call(call, LOAD_TIMEOUT_S))

    async def unload_adapter(self, name: str) -> dict[str, Any]:
        return _adapters(await self._call(UnloadAdapter(call_id=next(self._call_ids), name=name), None))

    def shut_down(self, *, is_draining: bool) -> None:
        """Tell the engine to leave; its end is seen by whoever watches the process."""
        if self._failure is None and self._engine:
            self._send(Shutdown(is_draining))

    def lose(self, reason: str) -> None:
        """The engine is gone. Everybody who waits is told; the first reason stays."""
        if self._failure is not None:
            return
        self._failure = reason
        log(logger("server"), "engine lost", reason=reason)
        for stream in self._streams.values():
            stream.fail(self._lost())
        self._streams.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(self._lost())
        self._hello.set()

    def forget(self, request_id: str) -> None:
        """Drop a stream; deltas that still come for it are ignored."""
        self._streams.pop(request_id, None)

    def close(self) -> None:
        """Stop reading and close the socket."""
        if self._reader is not None:
            self._reader.cancel()
        self._socket.close()
        self._context.term()

    def _lost(self) -> WorkerLost:
        return WorkerLost(f"the engine is gone ({self._failure}); the server must be restarted")

    def _check(self) -> None:
        if self._failure is not None:
            raise self._lost()

    def _send(self, message: ToEngine) -> None:
        # With no high-water mark a send is done at once; the future holds an error only if the socket is broken.
        self._socket.send_multipart([self._engine, self._encoder.encode(message)], copy=True)

    async def _call(self, message: Query | Flush | LoadAdapter | UnloadAdapter, timeout_s: float | None = -1.0) -> Ack:
        """The engine's answer. `timeout_s`: None waits as long as the engine lives; -1 is the client's own."""
        self._check()
        timeout_s = self._call_timeout_s if timeout_s == -1.0 else timeout_s
        answer: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = answer
        self._send(message)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as error:
            raise WorkerLost(f"the engine did not answer within {timeout_s:g} s") from error
        finally:
            self._calls.pop(message.call_id, None)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                self._handle(frames[0], self._decoder.decode(frames[-1]))
            except (msgspec.DecodeError, InvariantError) as error:
                self.lose(f"it sent what this version cannot read: {error}")
                return

    def _handle(self, sender: bytes, message: FromEngine) -> None:
        match message:
            case Deltas(items):
                for delta in items:
                    stream = self._streams.get(delta.request_id)
                    if stream is not None:
                        stream.feed(delta)
            case Ack():
                call = self._calls.get(message.call_id)
                if call is not None and not call.done():
                    call.set_result(message)
            case Hello():
                if message.version != WIRE_VERSION:
                    raise InvariantError(f"wire version {message.version}, expected {WIRE_VERSION}")
                self._engine, self._info = sender, dict(message.info)
                self._hello.set()
            case Dying(reason):
                self.lose(reason)


def _adapters(ack: Ack) -> dict[str, Any]:
    """Facts of all adapters. Errors: RequestError when the engine refused."""
    if ack.error is not None:
        raise RequestError(ack.error, param=ack.error_param)
    return cast(dict[str, Any], ack.info["adapters"])
