"""How much an engine's process grows from its imports to its first answer, beside the bytes that it announced.

In: a server that runs and has answered nothing yet, its model folder. Out: a Growth.
Announced are the weights, as `baltoro sizes` counts them in the engine's dtype, and the pool of its memory plan.
Limits: the pool is reserved at once but enters RAM as it is used, so a low ratio says only that nothing is held twice;
of a model of some MB, most of the growth is code of torch that its first operations bring in. Linux only (/proc).
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from baltoro.bench.load import stream_completion
from baltoro.bench.processes import Server
from baltoro.model.config import K3Config
from baltoro.model.sizes import measure
from baltoro.observe import resident_bytes

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes: in RAM after the imports and after the first answer; weights and pool as announced."""

    start_bytes: int
    answered_bytes: int
    weight_bytes: int
    pool_bytes: int

    @property
    def grown_bytes(self) -> int:
        return self.answered_bytes - self.start_bytes

    @property
    def ratio(self) -> float:
        """Growth over what was announced."""
        return self.grown_bytes / (self.weight_bytes + self.pool_bytes)


def first_answer_growth(server: Server, folder: Path) -> Growth:
    """Ask for one answer and measure. Errors: WorkerLost with what the server said."""
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=TIMEOUT_S) as reply:
        engine = json.load(reply)["engine"]
    stream_completion(server.url, server.model, "A module is a file of definitions.", 16)
    config = K3Config.load(folder).with_(dtype=engine["model"]["dtype"])
    return Growth(
        start_bytes=engine["process"]["start_bytes"],
        answered_bytes=resident_bytes(engine["process"]["id"]),
        weight_bytes=measure(config).weight_bytes_per_rank,
        pool_bytes=engine["memory"]["arena_bytes"],
    )
