"""An engine that says what a test wrote down, over the real socket protocol, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from baltoro.protocol.completion import TokenDelta, TopLogprob
from baltoro.protocol.sampling import FinishReason
from baltoro.protocol.worker import (
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


@dataclass(frozen=True)
class Reply:
    """What one completion says: ids step by step, then why it ended. `stall_at`: that step never comes."""

    steps: Sequence[Sequence[int]]
    finish: FinishReason = "stop"
    num_trimmed: int = 0
    stop_reason: int | str | None = None
    stall_at: int | None = None
    error: str | None = None
    error_status: int | None = None


Script = Callable[[Submit, int], Reply]


@dataclass
class FakeEngine:
    """Connects like an engine process and answers each completion by `script`."""

    address: str
    script: Script
    submits: list[Submit] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_flushes: int = 0
    flush_error: str | None = None
    num_cached: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    is_mute: bool = False
    shutdown: Shutdown | None = None
    loads: list[LoadAdapter] = field(default_factory=list)
    adapters: dict[str, dict[str, Any]] = field(default_factory=dict)
    adapter_error: str | None = None
    unloading: list[UnloadAdapter] = field(default_factory=list)
    is_busy: bool = False

    def __post_init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self.address)
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.changed = asyncio.Event()

    def start(self) -> None:
        self._send(Hello(info={"fake": True, "adapters": self.adapters}))
        self._reader = asyncio.create_task(self._read())

    def die(self, reason: str) -> None:
        self._send(Dying(reason))

    def send_garbage(self) -> None:
        self._socket.send(b"\xc1 not msgpack")

    def close(self) -> None:
        self._reader.cancel()
        for task in self._tasks.values():
            task.cancel()
        self._socket.close()
        self._context.term()

    async def until(self, is_so: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until something that this engine records is so."""
        async with asyncio.timeout(timeout_s):
            while not is_so():
                self.changed.clear()
                await self.changed.wait()

    def _send(self, message: FromEngine) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    async def _read(self) -> None:
        decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        while True:
            message = decoder.decode(await self._socket.recv())
            match message:
                case Submit():
                    self.submits.append(message)
                    for index in range(message.n):
                        task = asyncio.create_task(self._answer(message, index))
                        self._tasks[message.request_id, index] = task
                case Abort(request_id):
                    self._abort(request_id)
                case Query(call_id) if not self.is_mute:
                    self._send(Ack(call_id=call_id, info=self.info))
                case Flush(call_id) if not self.is_mute:
                    self.num_flushes += 1
                    self._send(Ack(call_id=call_id, error=self.flush_error))
                case LoadAdapter():
                    self.loads.append(message)
                    if self.adapter_error is None:
                        self.adapters[message.name] = {"path": message.path or "", "version": len(self.loads)}
                    fault = {"error": self.adapter_error, "error_status": 400, "error_param": "lora_name"}
                    failed = {} if self.adapter_error is None else fault
                    self._send(Ack(call_id=message.call_id, info={"adapters": self.adapters}, **failed))
                case UnloadAdapter():
                    del self.adapters[message.name]
                    self.unloading.append(message)
                    if not self.is_busy:
                        self.end_unloads()
                case Shutdown():
                    self.shutdown = message
                case _:
                    pass
            self.changed.set()

    def end_unloads(self) -> None:
        """The last users of adapters that were unloaded have ended."""
        while self.unloading:
            self._send(Ack(call_id=self.unloading.pop().call_id, info={"adapters": self.adapters}))

    def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        for (id_, index), task in self._tasks.items():
            if request_id in ("", id_) and not task.done():
                task.cancel()
                self._send(Deltas((TokenDelta(request_id=id_, index=index, finish_reason="abort"),)))

    async def _answer(self, submit: Submit, index: int) -> None:
        reply = self.script(submit, index)
        numbers = {"num_prompt_tokens": len(submit.token_ids), "num_cached_tokens": self.num_cached}
        for at, ids in enumerate(reply.steps):
            if at == reply.stall_at:
                await asyncio.Event().wait()
            is_last = at == len(reply.steps) - 1
            delta = TokenDelta(
                request_id=submit.request_id,
                index=index,
                token_ids=tuple(ids),
                finish_reason=reply.finish if is_last else None,
                num_trimmed=reply.num_trimmed if is_last else 0,
                stop_reason=reply.stop_reason if is_last else None,
                error=reply.error if is_last else None,
                error_status=reply.error_status if is_last else None,
                **(numbers if at == 0 else {}),
                **_logprobs(submit, ids, is_first=at == 0),
            )
            self._send(Deltas((delta,)))
            await asyncio.sleep(0)


def _logprobs(submit: Submit, ids: Sequence[int], *, is_first: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    k = submit.params.logprobs
    if k is not None:
        fields["logprobs"] = tuple(logprob(i) for i in ids)
        fields["top_logprobs"] = tuple(tuple(TopLogprob(97 + j, -0.5 - j) for j in range(k)) for _ in ids)
    if is_first and submit.params.prompt_logprobs is not None:
        fields["prompt_logprobs"] = (None, *(logprob(i) for i in submit.token_ids[1:]))
    return fields


def logprob(token: int) -> float:
    """The logprob this engine gives an id."""
    return -(token % 7) / 8 - 0.125
