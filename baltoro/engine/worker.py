"""One process: inbox, engine, outbox. The engine's end of the Worker contract.

In: messages of `protocol.worker`, from whoever is at the other end of the line (`line.py`). Out: Hello when the model
is loaded (or a trainer comes), Deltas after each step, an Ack for each call, Dying when it ends by an error, loading
included.
Invariants: a bad request is answered and hurts no other; the inbox is read between any two steps, so an abort waits for
one step at most; a drain finishes what was accepted and refuses the rest; books are audited whenever it falls idle.
Not here: who may speak (`line.py`), trainers that come and go (`visits.py`); starting and watching the process (`cli`);
stop rules and masks, which `cli` brings along from `chat`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import zmq

from baltoro.engine.adapter_version import AdapterVersion
from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine, load_engine
from baltoro.engine.gate import Gate
from baltoro.engine.graphs import Report
from baltoro.engine.intake import Masks, StopRules
from baltoro.engine.line import HostLine, Line, ParentLine
from baltoro.engine.pressure import pressure
from baltoro.engine.publish import Publisher, PublishOptions
from baltoro.engine.threads import set_threads
from baltoro.engine.visits import Visits
from baltoro.errors import BaltoroError, CapacityError, InvariantError, UserError
from baltoro.model.adapter import adapter_from_bytes
from baltoro.observe import log, logger, resident_bytes
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.worker import (
    Abort,
    Ack,
    Attach,
    Deltas,
    Detach,
    Dying,
    Flush,
    FromTrainer,
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
OnReady = Callable[[Mapping[str, Any]], None]


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
        line = stack.enter_context(ParentLine(address))
        worker, gate = _build(stack, line, build)
        if publish is not None:
            publisher = Publisher(worker.engine, gate, publish)
            publisher.start()
            stack.callback(publisher.close)
        worker.work()


def serve_trainers(
    line: HostLine, door: socket.socket, build: Callable[[], Engine], facts: Mapping[str, Any], on_ready: OnReady
) -> None:
    """Build the engine, work for the trainers that come to `line`, one after the other, until SIGTERM or SIGINT; their
    publications come to `door`. `facts`: of the Hello. `on_ready` is told what the engine says of itself."""
    with ExitStack() as stack:
        stack.enter_context(line)
        worker, gate = _build(stack, line, build)
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, worker.on_signal))
        worker.visits = Visits(line, worker.engine, gate, door, facts)
        stack.callback(worker.visits.close)
        on_ready(worker.engine.describe())
        worker.work()
        line.send(Dying("it was stopped"))


def _build(stack: ExitStack, line: Line, build: Callable[[], Engine]) -> tuple[Worker, Gate]:
    start_bytes = resident_bytes()
    engine = build()
    gate = Gate()
    stack.callback(gate.close)
    worker = Worker(line, engine, start_bytes=start_bytes, gate=gate)
    stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, worker.on_signal))
    stack.callback(engine.close)  # first on the way out: a second SIGTERM does not cut what the disk tier writes
    return worker, gate


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


class Worker:
    """Drives one engine from a line. Single writer: its own loop."""

    def __init__(self, line: Line, engine: Engine, *, start_bytes: int = 0, gate: Gate | None = None) -> None:
        """`start_bytes`: memory of the process when everything was imported and nothing loaded. `gate`: where other
        threads bring work that is to be done between two steps."""
        self.engine = engine
        self.visits: Visits | None = None  # of trainers, who are told Hello when they come
        self._line, self._gate = line, gate
        self._start_bytes = start_bytes
        self._poller = zmq.Poller()
        self._poller.register(line.socket, zmq.POLLIN)
        if gate is not None:
            self._poller.register(gate.fileno(), zmq.POLLIN)
        self._unloading: list[tuple[str, AdapterVersion]] = []
        self._is_leaving = False
        self._is_audited = True
        self._logger = logger("engine")

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM: finish what runs, where the line drains, then leave."""
        self._is_leaving = True

    def work(self) -> None:
        """The loop. Returns when told to leave and done, or when the parent is gone."""
        process = {"id": os.getpid(), "start_bytes": self._start_bytes}
        info: dict[str, Any] = {**self.engine.describe(), "process": process}
        if self.visits is None:
            log(self._logger, "engine ready", **info)
            self._line.send(Hello(info=info))
        while not self._is_done():
            if self._line.is_orphan:
                log(self._logger, "the parent process is gone")
                return
            self._read_all()
            if self._gate is not None:
                self._gate.run_due()
            if self.engine.has_work:
                self._is_audited = False
                deltas = self.engine.step()
                if deltas:
                    self._line.send(Deltas(tuple(deltas)))
            self._answer_unloads()
        level = logging.INFO if self.visits is None else logging.DEBUG
        log(self._logger, "engine leaves", level=level, stats=self.engine.stats())

    def _is_done(self) -> bool:
        if not self._line.drains:
            return self._is_leaving
        if self._is_leaving and self.engine.is_asleep:
            self.engine.wake()  # what waits was accepted
        return self._is_leaving and not self.engine.has_work

    def _read_all(self) -> None:
        """Handle every message that is here; without work, wait for one."""
        is_idle = not self.engine.has_work and not self._poller.poll(IDLE_MS if self._is_audited else 0)
        if is_idle and not self._is_audited:
            self.engine.audit()
            self._is_audited = True
        while (message := self._line.receive()) is not None:
            self._handle(message)

    def _handle(self, message: ToEngine | FromTrainer) -> None:
        match message:
            case Attach() | Detach():
                assert self.visits is not None
                self.visits.change(message)
            case Submit():
                self._submit(message)
            case Abort(request_id):
                self.engine.abort(request_id)
            case Flush(call_id):
                self.engine.flush()
                self._line.send(Ack(call_id=call_id))
            case LoadAdapter() | UnloadAdapter():
                self._change_adapters(message)
            case Sleep(call_id):
                self._line.send(Ack(call_id=call_id, info=dict(self.engine.sleep())))
            case Wake(call_id):
                self._line.send(Ack(call_id=call_id, info=dict(self.engine.wake())))
            case Look(call_id):
                look = {"pressure": asdict(pressure(self.engine.scheduler))}
                self._line.send(Ack(call_id=call_id, info={**look, "adapters": self.engine.adapters.facts()}))
            case Query(call_id):
                self._line.send(Ack(call_id=call_id, info=self.engine.stats()))
            case Shutdown(is_draining):
                self._is_leaving = True
                if not is_draining:
                    self.engine.abort()

    def _change_adapters(self, message: LoadAdapter | UnloadAdapter) -> None:
        """A wrong adapter is the caller's fault and hurts nobody. An unload is answered once its users have ended."""
        engine = self.engine
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
            self._line.send(ack)
            return
        self._line.send(Ack(call_id=message.call_id, info={"adapters": engine.adapters.facts()}))

    def _answer_unloads(self) -> None:
        gone = [call_id for call_id, version in self._unloading if version.is_gone]
        self._unloading = [(call_id, version) for call_id, version in self._unloading if not version.is_gone]
        for call_id in gone:
            self._line.send(Ack(call_id=call_id, info={"adapters": self.engine.adapters.facts()}))

    def _submit(self, submit: Submit) -> None:
        try:
            if self._is_leaving:
                raise CapacityError("this server is shutting down: send the request to another one")
            self.engine.add(submit)
        except InvariantError:
            raise
        except BaltoroError as error:
            self._line.send(Deltas(tuple(_refusal(submit, index, error) for index in range(max(1, submit.n)))))


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
