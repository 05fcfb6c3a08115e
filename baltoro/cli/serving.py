"""The HTTP process: waits for the engine, serves, drains, and tells clients when the engine dies.

In: an engine process, the server's settings, a bound socket. Out: an exit code - 0 after a graceful stop, 1 when the
engine died.
Invariants: imports no torch; a signal lets running requests end and then ends both processes; an engine that dies is
told to every client before this process ends.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import uvicorn

from baltoro.chat.tokenizer import Tokenizer
from baltoro.cli.engine_process import STOP_S, EngineProcess
from baltoro.errors import ConfigError, WorkerLost
from baltoro.server.app import create_app
from baltoro.server.client import WorkerClient
from baltoro.server.config import ServerConfig

LINGER_S = 2.0
"""How long clients can still ask what happened after the engine died."""

OnReady = Callable[[ServerConfig], None]


def serve_until_stopped(
    engine: EngineProcess, server: ServerConfig, listener: socket.socket, on_ready: OnReady, *, drain_s: float
) -> int:
    """Serve on `listener` until a signal, or until the engine dies. The exit code.

    The context of `server` is filled in when the engine says it. Errors: WorkerLost if the engine does not start.
    """
    engine.log_options.apply()
    return asyncio.run(_Serving(engine, server, listener, on_ready, drain_s).run())


class _Serving:
    """The life of one server. Single writer: its event loop."""

    def __init__(
        self, engine: EngineProcess, server: ServerConfig, listener: socket.socket, on_ready: OnReady, drain_s: float
    ) -> None:
        self._engine = engine
        self._config = server
        self._listener = listener
        self._on_ready = on_ready
        self._drain_s = drain_s
        self._stopped = asyncio.Event()
        self._http: uvicorn.Server | None = None

    async def run(self) -> int:
        """Wait for the engine, serve, drain. The exit code."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            # While uvicorn serves, its own handlers are in place; it raises the signal again when it has drained.
            loop.add_signal_handler(signum, self._stopped.set)
        worker = WorkerClient(self._engine.address)
        worker.start()
        loop.add_reader(self._engine.sentinel, self._on_engine_end, worker)
        try:
            tokenizer = await asyncio.to_thread(Tokenizer.load, self._engine.model_dir)
            info = await self._ready(worker)
            if info is None:
                return 0
            check_vocabulary(info["model"]["vocab_size"], tokenizer.vocab_size)
            self._config = replace(self._config, max_context_tokens=info["model"]["max_context"])
            await self._serve(worker, tokenizer)
            if worker.failure is not None:
                return 1
            worker.shut_down(is_draining=False)
            await asyncio.to_thread(self._engine.join, STOP_S)
            return 0
        finally:
            loop.remove_reader(self._engine.sentinel)
            worker.close()

    async def _ready(self, worker: WorkerClient) -> Mapping[str, Any] | None:
        """The engine's Hello; None when a signal came first."""
        waits = asyncio.create_task(worker.ready()), asyncio.create_task(self._stopped.wait())
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        if worker.failure is not None:
            await asyncio.to_thread(self._engine.join, STOP_S)  # it may still have something to say
            raise WorkerLost(f"the engine did not start: {worker.failure}")
        return None if self._stopped.is_set() else worker.info

    async def _serve(self, worker: WorkerClient, tokenizer: Tokenizer) -> None:
        options = uvicorn.Config(
            create_app(self._config, worker, tokenizer),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, int(self._drain_s)),
        )
        self._http = _ReadyServer(options, lambda: self._on_ready(self._config))
        await self._http.serve(sockets=[self._listener])

    def _on_engine_end(self, worker: WorkerClient) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._engine.sentinel)
        worker.lose(f"its process ended with exit code {self._engine.join(STOP_S)}")
        loop.call_later(LINGER_S, self._stop)

    def _stop(self) -> None:
        if self._http is not None:
            self._http.should_exit = True


def check_vocabulary(num_model: int, num_tokenizer: int) -> None:
    """Errors: ConfigError if the model can say ids that the tokenizer cannot spell."""
    if num_tokenizer < num_model:
        raise ConfigError(
            f"the model has {num_model} ids, its tokenizer only {num_tokenizer}: they do not fit together"
        )


class _ReadyServer(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell()
