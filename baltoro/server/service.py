"""What the routes work with, handed to each of them: settings, the engine, the tokenizer, the counters.

Invariants: one per application; frozen, its parts have their own writers.
"""

from __future__ import annotations

from dataclasses import dataclass

from baltoro.chat.tokenizer import Tokenizer
from baltoro.errors import WorkerLost
from baltoro.server.adapters import LoadedAdapters
from baltoro.server.config import ServerConfig
from baltoro.server.health import Metrics
from baltoro.server.worker import Worker


@dataclass(frozen=True, slots=True)
class Service:
    """Everything a handler may need. `started_s` is the Unix time of the start."""

    config: ServerConfig
    worker: Worker
    tokenizer: Tokenizer
    metrics: Metrics
    started_s: int
    adapters: LoadedAdapters

    def select(self, asked: str | None) -> str | None:
        """The adapter that `model` of a body asks for; None is the base. Errors: NotFound."""
        return self.adapters.select(asked, self.config.model_name)

    def label(self, adapter: str | None) -> str:
        """What replies call the model."""
        return self.config.model_name if adapter is None else f"{self.config.model_name}:{adapter}"

    def check_alive(self) -> None:
        """Errors: WorkerLost when the engine is gone."""
        if self.worker.failure is not None:
            raise WorkerLost(f"the engine is gone ({self.worker.failure}); the server must be restarted")
