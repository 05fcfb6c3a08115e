"""Servers side by side on one machine: first token, one stream, sixteen streams, in interleaved rounds.

In: a model folder. Out: samples per server and the ratios of medians. Both serve the same files, one after the other in
each round, so that a slow minute of the machine hits both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baltoro.bench.load import run_wave
from baltoro.bench.processes import Server
from baltoro.bench.record import median

TEXT = (
    "A module is a file of definitions. Its functions can be called from other files once it has been imported. "
    "A list keeps its items in order, a set keeps each item once, and a dictionary finds a value by its key. "
    "An exception that nobody catches ends the program and prints where it came from. "
)


@dataclass(frozen=True, slots=True)
class Load:
    """What one round asks of a server. `prompt_characters` per prompt; `streams` at once in the crowded part."""

    prompt_characters: int = 400
    max_tokens: int = 128
    streams: int = 16
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class Round:
    """One server in one round: seconds to the first token alone, tokens/s alone and of all streams together."""

    first_s: float
    one_tokens_per_s: float
    all_tokens_per_s: float
    crowded_first_s: float


def measure(servers: Sequence[Server], load: Load, on_round: Callable[[], None]) -> dict[str, list[Round]]:
    """Rounds of every server, after one that is thrown away."""
    found: dict[str, list[Round]] = {server.name: [] for server in servers}
    for number in range(load.rounds + 1):
        for server in servers:
            result = _round(server, load, number)
            if number:
                found[server.name].append(result)
            on_round()
    return found


def summary(rounds: dict[str, list[Round]], ours: str = "baltoro") -> dict[str, Any]:
    """Medians of each server, and ours over each other's."""
    samples = {name: [asdict(r) for r in found] for name, found in rounds.items()}
    medians = {name: {key: median([r[key] for r in rows]) for key in rows[0]} for name, rows in samples.items()}
    ratios = {
        name: {key: medians[ours][key] / max(theirs[key], 1e-12) for key in ("one_tokens_per_s", "all_tokens_per_s")}
        for name, theirs in medians.items()
        if name != ours
    }
    return {"medians": medians, "ratios": ratios, "samples": samples}


def _round(server: Server, load: Load, number: int) -> Round:
    # prompts differ between rounds and streams: a prefix cache would otherwise answer for a prefill
    alone = run_wave(server.url, server.model, [_prompt(load, number, 0)], [load.max_tokens])
    many = [_prompt(load, number, 1 + stream) for stream in range(load.streams)]
    crowd = run_wave(server.url, server.model, many, [load.max_tokens] * load.streams)
    return Round(alone.first_s, alone.timings[0].tokens_per_s, crowd.tokens_per_s, crowd.first_s)


def _prompt(load: Load, number: int, stream: int) -> str:
    start = f"{number}.{stream}. "
    return (start + TEXT * (load.prompt_characters // len(TEXT) + 1))[: load.prompt_characters]
