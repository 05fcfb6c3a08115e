"""What the routes work with, handed to each of them: settings, the engine, the tokenizer, the counters.

Invariants: one per application; frozen, its parts have their own writers.
"""

from __future__ import annotations

from dataclasses import dataclass

from baltoro.chat.tokenizer import Tokenizer
from baltoro.errors import WorkerLost
from baltoro.server.client import Worker
from baltoro.server.config import ServerConfig
from baltoro.server.errors import NotFound
from baltoro.server.health import Metrics


@dataclass(frozen=True, slots=True)
class Service:
    """Everything a handler may need. `started_s` is the Unix time of the start."""

    config: ServerConfig
    worker: Worker
    tokenizer: Tokenizer
    metrics: Metrics
    started_s: int

    def check_model(self, asked: str | None) -> None:
        """Errors: NotFound when another model than ours is asked for."""
        if asked is not None and asked != self.config.model_name:
            raise NotFound(
                f"the model {asked} is not here; this server has {self.config.model_name}",
                param="model",
                code="model_not_found",
            )

    def check_alive(self) -> None:
        """Errors: WorkerLost when the engine is gone."""
        if self.worker.failure is not None:
            raise WorkerLost(f"the engine is gone ({self.worker.failure}); the server must be restarted")
