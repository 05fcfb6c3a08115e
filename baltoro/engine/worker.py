"""One process: inbox, engine, outbox. The engine's end of the Worker contract.

In: messages of `protocol.worker` from a server, whose ROUTER socket this end connects a DEALER to. Out: Hello when the
model is loaded, Deltas after each step, an Ack for each call, and Dying when it ends by an error, loading included.
Invariants: a bad request is answered and hurts no other; the inbox is read between any two steps, so an abort waits for
one step at most; a drain finishes what was accepted and refuses the rest; books are audited whenever it falls idle.
Not here: starting and watching the process (`cli`); stop rules and masks, which `cli` brings along from `chat`.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import msgspec
import zmq

from baltoro.engine.adapters import AdapterVersion
from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine, Masks, StopRules, load_engine
from baltoro.engine.gate import Gate
from baltoro.engine.graphs import Report
from baltoro.engine.pressure import pressure
from baltoro.engine.publish import Publisher, PublishOptions
from baltoro.engine.threads import set_threads
from baltoro.errors import BaltoroError, CapacityError, InvariantError, UserError
from baltoro.model.adapter import adapter_from_bytes
from baltoro.observe import log, logger, resident_bytes
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.worker import (
    Abort,
    Ack,
    Deltas,
    Dying,
    Flush,
    FromEngine,
    Hello,
    LoadAdapter,
    Look,
    Query,
    Shutdown,
    Sleep,
    Submit,
    ToEngine,
    UnloadAdapter,
    Wake,
)

IDLE_MS = 1000
"""How long an idle worker waits for a message before it looks whether its parent still lives."""
LINGER_MS = 2000
"""How long the last messages may take to leave after the end."""


def run_worker(
    model_dir: str | Path,
    config: EngineConfig,
    address: str,
    *,
    eos_ids: Collection[int] | None = None,
    stop_rules: StopRules | None = None,
    masks: Masks | None = None,
    publish: PublishOptions | None = None,
    report: Report | None = None,
) -> None:
    """Load the model and serve on `address` until told to leave, or until the parent process is gone. `publish`: take
    new versions of an adapter from a channel meanwhile.

    SIGTERM drains. Errors: whatever stopped the engine, after the server was told.
    """

    def build() -> Engine:
        set_threads(model_dir)
        return load_engine(model_dir, config, eos_ids=eos_ids, stop_rules=stop_rules, masks=masks, report=report)

    serve(address, build, publish=publish)


def serve(address: str, build: Callable[[], Engine], *, publish: PublishOptions | None = None) -> None:
    """Connect, build the engine, work until the end."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        socket = stack.enter_context(context.socket(zmq.DEALER))
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
        outbox = stack.enter_context(_Outbox(socket))
        start_bytes = resident_bytes()
        engine = build()
        gate = Gate()
        stack.callback(gate.close)
        worker = Worker(socket, outbox, engine, start_bytes=start_bytes, gate=gate)
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, worker.on_signal))
        stack.callback(engine.close)  # first on the way out: a second SIGTERM does not cut what the disk tier writes
        if publish is not None:
            publisher = Publisher(engine, gate, publish)
            publisher.start()
            stack.callback(publisher.close)
        worker.work()


def end_with_parent(folder: Path | None = None) -> None:
    """End this process, which multiprocessing started, when the one that started it is gone, even if that was killed
    and this one is still loading. `folder`: of both, removed then."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


class _Outbox:
    """Sends messages; on the way out of an error, the reason as the last one."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.send(Dying(f"{kind.__name__}: {error}"))


class Worker:
    """Drives one engine from a socket. Single writer: its own loop."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        outbox: _Outbox,
        engine: Engine,
        *,
        start_bytes: int = 0,
        gate: Gate | None = None,
    ) -> None:
        """`start_bytes`: memory of the process when everything was imported and nothing loaded. `gate`: where other
        threads bring work that is to be done between two steps."""
        self._socket, self._outbox, self._engine, self._gate = socket, outbox, engine, gate
        self._start_bytes = start_bytes
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if gate is not None:
            self._poller.register(gate.fileno(), zmq.POLLIN)
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._unloading: list[tuple[str, AdapterVersion]] = []
        self._is_leaving = False
        self._is_audited = True
        self._parent = os.getppid()
        self._logger = logger("engine")

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM: finish what runs, then leave."""
        self._is_leaving = True

    def work(self) -> None:
        """The loop. Returns when told to leave and done, or when the parent is gone."""
        process = {"id": os.getpid(), "start_bytes": self._start_bytes}
        info: dict[str, Any] = {**self._engine.describe(), "process": process}
        log(self._logger, "engine ready", **info)
        self._outbox.send(Hello(info=info))
        while not self._is_done():
            if os.getppid() != self._parent:
                log(self._logger, "the parent process is gone")
                return
            self._read_all()
            if self._gate is not None:
                self._gate.run_due()
            if self._engine.has_work:
                self._is_audited = False
                deltas = self._engine.step()
                if deltas:
                    self._outbox.send(Deltas(tuple(deltas)))
            self._answer_unloads()
        log(self._logger, "engine leaves", stats=self._engine.stats())

    def _is_done(self) -> bool:
        if self._is_leaving and self._engine.is_asleep:
            self._engine.wake()  # what waits was accepted
        return self._is_leaving and not self._engine.has_work

    def _read_all(self) -> None:
        """Handle every message that is here; without work, wait for one."""
        if not self._engine.has_work and not self._poller.poll(IDLE_MS if self._is_audited else 0):
            if not self._is_audited:
                self._engine.audit()
                self._is_audited = True
            return
        while self._socket.poll(0):
            try:
                message = self._decoder.decode(self._socket.recv())
            except msgspec.DecodeError as error:
                raise InvariantError(f"the server sent what this version cannot read: {error}") from error
            self._handle(message)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id):
                self._engine.abort(request_id)
            case Flush(call_id):
                self._engine.flush()
                self._outbox.send(Ack(call_id=call_id))
            case LoadAdapter() | UnloadAdapter():
                self._change_adapters(message)
            case Sleep(call_id):
                self._outbox.send(Ack(call_id=call_id, info=dict(self._engine.sleep())))
            case Wake(call_id):
                self._outbox.send(Ack(call_id=call_id, info=dict(self._engine.wake())))
            case Look(call_id):
                look = {"pressure": asdict(pressure(self._engine.scheduler))}
                self._outbox.send(Ack(call_id=call_id, info={**look, "adapters": self._engine.adapters.facts()}))
            case Query(call_id):
                self._outbox.send(Ack(call_id=call_id, info=self._engine.stats()))
            case Shutdown(is_draining):
                self._is_leaving = True
                if not is_draining:
                    self._engine.abort()

    def _change_adapters(self, message: LoadAdapter | UnloadAdapter) -> None:
        """A wrong adapter is the caller's fault and hurts nobody. An unload is answered once its users have ended."""
        engine = self._engine
        try:
            if isinstance(message, UnloadAdapter):
                self._unloading.append((message.call_id, engine.unload_adapter(message.name)))
                return
            if message.path is not None:
                engine.load_adapter(message.name, message.path)
            else:
                weights = adapter_from_bytes(message.tensors, message.config, engine.model_config)
                engine.load_adapter(message.name, weights)
        except UserError as error:
            ack = Ack(call_id=message.call_id, error=str(error), error_status=error.status, error_param=error.param)
            self._outbox.send(ack)
            return
        self._outbox.send(Ack(call_id=message.call_id, info={"adapters": engine.adapters.facts()}))

    def _answer_unloads(self) -> None:
        gone = [call_id for call_id, version in self._unloading if version.is_gone]
        self._unloading = [(call_id, version) for call_id, version in self._unloading if not version.is_gone]
        for call_id in gone:
            self._outbox.send(Ack(call_id=call_id, info={"adapters": self._engine.adapters.facts()}))

    def _submit(self, submit: Submit) -> None:
        try:
            if self._is_leaving:
                raise CapacityError("this server is shutting down: send the request to another one")
            self._engine.add(submit)
        except InvariantError:
            raise
        except BaltoroError as error:
            self._outbox.send(Deltas(tuple(_refusal(submit, index, error) for index in range(max(1, submit.n)))))


def _refusal(submit: Submit, index: int, error: BaltoroError) -> TokenDelta:
    """The only delta of a completion that was not accepted."""
    return TokenDelta(
        request_id=submit.request_id,
        index=index,
        finish_reason="error",
        num_prompt_tokens=len(submit.token_ids),
        error=str(error),
        error_status=error.status,
    )
