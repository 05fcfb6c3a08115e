"""Two processes that make a server: the engine in one, HTTP in this one; started, watched and ended together.

In: a model folder, engine and server options, a bound socket. Out: an exit code - 0 after a graceful stop, 1 when the
engine died.
Invariants: this process never imports torch; the engine never outlives it, however it ends; a signal drains what runs
and then ends both; an engine that dies is told to every client before this process ends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from baltoro.chat.tokenizer import Tokenizer
from baltoro.observe import log, logger, setup_logging
from baltoro.server.app import create_app
from baltoro.server.client import WorkerClient
from baltoro.server.config import ServerConfig

if TYPE_CHECKING:
    from baltoro.engine.config import EngineConfig

# After the engine died: how long clients can still ask what happened.
LINGER_S = 2.0
ENGINE_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start. The context of `server` is filled in once the engine has said it."""

    model_dir: Path
    engine: EngineConfig
    server: ServerConfig
    log_level: str
    is_json_log: bool
    drain_s: float


def serve_until_stopped(launch: Launch, listener: socket.socket, on_ready: Callable[[ServerConfig], None]) -> int:
    """Start both processes and serve on `listener`. The exit code. Errors: WorkerLost if the engine does not start."""
    setup_logging(launch.log_level, is_json=launch.is_json_log)
    folder = tempfile.mkdtemp(prefix="baltoro-")
    address = f"ipc://{folder}/engine"
    # Spawned, not forked: the child must not inherit this process's sockets and threads.
    engine = multiprocessing.get_context("spawn").Process(
        target=engine_main,
        args=(str(launch.model_dir), launch.engine, address, launch.log_level, launch.is_json_log),
        name="baltoro-engine",
    )
    engine.start()
    try:
        return asyncio.run(_Serving(launch, listener, on_ready, engine, address).run())
    finally:
        _end(engine)
        shutil.rmtree(folder, ignore_errors=True)


class _Serving:
    """The life of one server. Single writer: its event loop."""

    def __init__(
        self,
        launch: Launch,
        listener: socket.socket,
        on_ready: Callable[[ServerConfig], None],
        engine: BaseProcess,
        address: str,
    ) -> None:
        self._launch = launch
        self._listener = listener
        self._on_ready = on_ready
        self._engine = engine
        self._address = address
        self._stopped = asyncio.Event()
        self._server: uvicorn.Server | None = None

    async def run(self) -> int:
        """Wait for the engine, serve, drain. The exit code."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            # While uvicorn serves, its own handlers are in place; it raises the signal again when it has drained.
            loop.add_signal_handler(signum, self._stopped.set)
        worker = WorkerClient(self._address)
        worker.start()
        loop.add_reader(self._engine.sentinel, self._on_engine_end, worker)
        try:
            tokenizer = await asyncio.to_thread(Tokenizer.load, self._launch.model_dir)
            info = await self._ready(worker)
            if info is None:
                return 0
            config = replace(self._launch.server, max_context_tokens=info["model"]["max_context"])
            await self._serve(config, worker, tokenizer)
            is_lost = worker.failure is not None
            worker.shut_down(is_draining=False)
            await asyncio.to_thread(self._engine.join, 0 if is_lost else ENGINE_STOP_S)
            return 1 if is_lost else 0
        finally:
            loop.remove_reader(self._engine.sentinel)
            worker.close()

    async def _ready(self, worker: WorkerClient) -> Mapping[str, Any] | None:
        """The engine's Hello; None when a signal came first."""
        waits = asyncio.create_task(worker.ready()), asyncio.create_task(self._stopped.wait())
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        return None if self._stopped.is_set() else waits[0].result()

    async def _serve(self, config: ServerConfig, worker: WorkerClient, tokenizer: Tokenizer) -> None:
        options = uvicorn.Config(
            create_app(config, worker, tokenizer),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, int(self._launch.drain_s)),
        )
        self._server = _ReadyServer(options, lambda: self._on_ready(config))
        await self._server.serve(sockets=[self._listener])

    def _on_engine_end(self, worker: WorkerClient) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._engine.sentinel)
        self._engine.join()
        worker.lose(f"its process ended with exit code {self._engine.exitcode}")
        loop.call_later(LINGER_S, self._stop)

    def _stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True


class _ReadyServer(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell()


def engine_main(model_dir: str, config: EngineConfig, address: str, log_level: str, is_json_log: bool) -> None:
    """The engine process. What `chat` makes of stop strings and grammars goes to an engine that speaks ids only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both processes; the server decides
    _end_with_parent()
    setup_logging(log_level, is_json=is_json_log)
    from baltoro.cli.factories import Factories
    from baltoro.engine.worker import run_worker

    start = time.monotonic()
    factories = Factories(Tokenizer.load(model_dir))
    log(logger("engine"), "engine starts", model=model_dir, imports_s=round(time.monotonic() - start, 2))
    run_worker(
        model_dir,
        config,
        address,
        eos_ids=factories.eos_ids,
        stop_rules=factories.stop_rule,
        masks=factories.mask,
    )


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def _end(process: BaseProcess) -> None:
    """Make sure that a process is gone."""
    for stop in (process.terminate, process.kill):
        if process.is_alive():
            stop()
            process.join(ENGINE_STOP_S)
    process.join()
    process.close()
