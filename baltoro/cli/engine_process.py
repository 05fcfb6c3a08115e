"""The engine's own process: started first, because loading takes longest, and never left behind.

In: a model folder and the engine's options. Out: a running process and the address at which it looks for a server.
Invariants: this module imports neither torch nor the server; the process ends with the block, and with this process
however that ends; Ctrl-C in the terminal is left to the server, which decides.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import Progress

from baltoro.errors import UserError
from baltoro.observe import setup_logging

if TYPE_CHECKING:
    from baltoro.engine.config import EngineConfig

STOP_S = 10.0
"""How long the process may take to leave before it is killed."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How a process logs."""

    level: str
    is_json: bool

    def apply(self) -> None:
        """Set this process up so."""
        setup_logging(self.level, is_json=self.is_json)


class EngineProcess:
    """A context manager: the process runs inside the block."""

    def __init__(self, model_dir: Path, config: EngineConfig, log_options: LogOptions) -> None:
        self.model_dir = model_dir
        self.log_options = log_options
        # A private folder: only this user can reach the socket in it.
        self._folder = tempfile.mkdtemp(prefix="baltoro-")
        self.address = f"ipc://{self._folder}/engine"
        # Spawned, not forked: the child must not inherit this process's sockets and threads.
        self._process = multiprocessing.get_context("spawn").Process(
            target=engine_main,
            args=(str(model_dir), config, self.address, log_options),
            name="baltoro-engine",
        )

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stop in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                stop()
                self._process.join(STOP_S)
        self._process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process ends."""
        return self._process.sentinel

    def join(self, timeout_s: float) -> int | None:
        """Wait for the end; the exit code, None if it still runs."""
        self._process.join(timeout_s)
        return self._process.exitcode


def engine_main(model_dir: str, config: EngineConfig, address: str, log_options: LogOptions) -> None:
    """The process. What `chat` makes of stop strings and grammars goes to an engine that speaks ids only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_options.apply()
    from baltoro.chat.factories import Factories
    from baltoro.chat.tokenizer import Tokenizer
    from baltoro.engine.worker import end_with_parent, run_worker

    end_with_parent()
    try:
        factories = Factories(Tokenizer.load(model_dir))
        run_worker(
            model_dir,
            config,
            address,
            eos_ids=factories.eos_ids,
            stop_rules=factories.stop_rule,
            masks=factories.mask,
            report=capture_bar(),
        )
    except UserError:
        sys.exit(1)  # the server was told why and says so; a traceback would only hide it


def capture_bar() -> Callable[[int, int], None]:
    """A bar on stderr that is there while CUDA graphs are captured."""
    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("capturing graphs")

    def report(done: int, total: int) -> None:
        if done == 1:
            bar.start()
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    return report
