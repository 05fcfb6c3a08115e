"""The driver's end of an engine in a process of its own: start it, send, wait for answers, notice its end.

In: what the process runs, messages of `protocol/worker.py`. Out: its deltas to `on_delta`, Acks to who asked.
Invariants: no wait is without a limit; an engine that is gone is WorkerLost with its reason in every call from then on;
what is on the machine is one private folder, which whoever lives longer removes: this end, or the engine when this
process is killed (`engine.worker.end_with_parent`).
Not here: what the messages are for (`engine_process.py`).
"""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from baltoro.errors import InvariantError, RequestError, WorkerLost
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.worker import (
    WIRE_VERSION,
    Ack,
    Deltas,
    Dying,
    FromEngine,
    Hello,
    Look,
    Query,
    Shutdown,
    Sleep,
    ToEngine,
    Wake,
)
from baltoro.transfer.local import RAM

STOP_S = 10.0
"""How long the engine may take to leave before it is killed."""


class EngineLink:
    """One engine process and the socket to it. Not thread-safe. `start`, then anything, then `close`."""

    def __init__(self, on_delta: Callable[[TokenDelta], None], *, call_s: float) -> None:
        """`on_delta` is told every delta as it is taken; `call_s`: how long an answer may take."""
        self.info: dict[str, Any] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="baltoro-", dir=RAM if RAM.is_dir() else None))
        self.address = f"ipc://{self.folder}/engine"
        self._on_delta, self._call_s = on_delta, call_s
        self._acks: dict[str, Ack | None] = {}
        self._failure: str | None = None
        self._numbers = itertools.count()
        self._engine = b""
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for name in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(name, 0)
        self._socket.bind(self.address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self, entry: Callable[..., None], arguments: tuple[Any, ...], *, limit_s: float) -> None:
        """Run `entry(*arguments)` and wait for its Hello. Errors: WorkerLost, after everything was removed."""
        # Spawned, not forked: the child must not inherit this process's sockets and threads.
        process = multiprocessing.get_context("spawn").Process(
            target=entry, args=arguments, name="baltoro-engine", daemon=True
        )
        process.start()
        self._process = process
        self._poller.register(process.sentinel, zmq.POLLIN)
        try:
            self.until(lambda: bool(self._engine), limit_s, "start")
        except WorkerLost:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        """Of the engine."""
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    def check(self) -> None:
        """Errors: WorkerLost once the engine is gone."""
        if self._failure is not None:
            raise WorkerLost(f"the engine is gone: {self._failure}")

    def send(self, message: ToEngine) -> None:
        self.check()
        self._socket.send_multipart([self._engine, msgspec.msgpack.encode(message)])

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
        here = dict(self._poller.poll(int(max(0.0, timeout_s) * 1000)))
        while self._socket.poll(0):
            sender, frame = self._socket.recv_multipart()
            self._handle(sender, self._decoder.decode(frame))
        process = self._process
        if process is not None and process.sentinel in here and self._failure is None and not self._socket.poll(0):
            process.join(STOP_S)
            self._failure = f"its process ended with exit code {process.exitcode}"

    def close(self) -> None:
        """End the engine and remove what is on the machine. May be called twice."""
        if self._socket.closed:
            return
        process = self._process
        if process is not None:
            if self._failure is None and self._engine:
                self.send(Shutdown(is_draining=False))
                process.join(STOP_S)
            for stop in (process.terminate, process.kill):
                if process.is_alive():
                    stop()
                    process.join(STOP_S)
        self._failure = self._failure or "it was closed"
        self._socket.close()
        self._context.term()
        self._remove()

    def _handle(self, sender: bytes, message: FromEngine) -> None:
        match message:
            case Deltas(items):
                for delta in items:
                    self._on_delta(delta)
            case Ack():
                if message.call_id in self._acks:
                    self._acks[message.call_id] = message
            case Hello():
                if message.version != WIRE_VERSION:
                    raise InvariantError(f"wire version {message.version}, expected {WIRE_VERSION}")
                self._engine, self.info = sender, dict(message.info)
            case Dying(reason):
                self._failure = reason
