"""The driver's end of an engine in another process: send, wait for answers, notice its end.

In: an `End`, messages of `protocol/worker.py`. Out: the engine's deltas to `on_delta`, Acks to who asked.
Invariants: no wait is without a limit; an engine that is gone is WorkerLost with its reason in every call from then on;
one that does not want us is ConfigError with its reason.
Not here: how the engine is reached (`engine_ends.py`, `engine_remote.py`), what the messages are for
(`engine_process.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from baltoro.errors import ConfigError, PeerError, RequestError, UserError, WorkerLost
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.worker import (
    WIRE_VERSION,
    Ack,
    Attach,
    Deltas,
    Dying,
    FromEngine,
    FromTrainer,
    Hello,
    Look,
    Query,
    Refused,
    Sleep,
    ToEngine,
    Wake,
)
from baltoro.rl.engine_ends import End


class EngineLink:
    """One engine. Not thread-safe. `open`, then anything, then `close`."""

    def __init__(self, end: End, on_delta: Callable[[TokenDelta], None], *, call_s: float) -> None:
        """`on_delta` is told every delta as it is taken; `call_s`: how long an answer may take."""
        self.info: dict[str, Any] = {}
        self.end = end
        self._on_delta, self._call_s = on_delta, call_s
        self._acks: dict[str, Ack | None] = {}
        self._failure: str | None = None
        self._refusal: str | None = None
        self._is_closed = False
        self._numbers = itertools.count()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    def open(self, attach: Attach | None, *, limit_s: float) -> None:
        """Wait for the engine's Hello; `attach` asks for it. Errors: WorkerLost, ConfigError, and then it is closed."""
        try:
            if attach is not None:
                self.send(attach)
            self.until(lambda: bool(self.info), limit_s, "start")
        except (PeerError, UserError):
            self.close()
            raise

    def check(self) -> None:
        """Errors: WorkerLost once the engine is gone, ConfigError if it does not want us."""
        if self._refusal is not None:
            raise ConfigError(self._refusal)
        if self._failure is not None:
            raise WorkerLost(f"{'the engine is gone' if self.info else 'there is no engine'}: {self._failure}")

    def send(self, message: ToEngine | FromTrainer) -> None:
        self.check()
        self.end.send(msgspec.msgpack.encode(message))

    def name(self) -> str:
        """A name for a call that no other has."""
        return f"call-{next(self._numbers)}"

    def call(self, message: Sleep | Wake | Look | Query) -> Ack:
        """The engine's answer."""
        name = message.call_id
        self._acks[name] = None
        try:
            self.send(message)
            self.until(lambda: self._acks[name] is not None, self._call_s, "answer")
            ack = self._acks[name]
            assert ack is not None
        finally:
            del self._acks[name]
        if ack.error is not None:
            raise RequestError(ack.error)
        return ack

    def until(self, is_done: Callable[[], bool], limit_s: float, verb: str) -> None:
        """Take messages until `is_done`. Errors: WorkerLost when the engine is gone, or silent for too long."""
        deadline = time.monotonic() + limit_s
        while not is_done():
            self.check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerLost(f"the engine did not {verb} within {limit_s:g} s")
            self.take(left)

    def take(self, timeout_s: float) -> None:
        """Take what has come, waiting up to `timeout_s` for the first of it; notice the engine's end."""
        if self._failure is not None:
            return
        self.end.wait(timeout_s)
        try:
            while (frame := self.end.receive()) is not None:
                self._handle(self._decoder.decode(frame))
        except msgspec.MsgspecError as error:
            self._failure = f"it sent what this version cannot read: {error}"
        self._failure = self._failure or self.end.lost()

    def close(self) -> None:
        """Say farewell, let go of the engine. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        is_told = self._failure is None and self._refusal is None and bool(self.info)
        if is_told:
            self.send(self.end.farewell)
        self._failure = self._failure or "it was closed"
        self.end.close(was_told=is_told)

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Deltas(items):
                for delta in items:
                    self._on_delta(delta)
            case Ack():
                if message.call_id in self._acks:
                    self._acks[message.call_id] = message
            case Hello():
                self._refusal = check_version(message.version)
                self.info = dict(message.info) if self._refusal is None else {}
            case Refused(reason):
                self._refusal = reason
            case Dying(reason):
                self._failure = reason


def check_version(there: int) -> str | None:
    """Why an engine of this wire version cannot be spoken to."""
    if there == WIRE_VERSION:
        return None
    return (
        f"the engine speaks wire version {there}, the trainer {WIRE_VERSION}: run one version of baltoro on both hosts"
    )
