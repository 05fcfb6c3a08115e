"""What the cache and the pool are good for, on replayed traces: figures of the memory that need no model.

mixed     many short, then few long, then both: a unified pool against one that is split in half
agent     long system prompt, growing turns, forks: hits, tokens computed again and bytes held, for each policy
arrivals  a shared beginning with a long tail of its own behind it, met a second and a third time

In: nothing but sizes. Out: dictionaries for a record. Shapes: K3 on eight ranks, one rank's arena.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baltoro.bench.replay import Replay, Replayed
from baltoro.bench.replay_plan import replay_config
from baltoro.bench.replay_report import by_label, whole_within
from baltoro.bench.shapes import named_shape, rank_shape
from baltoro.bench.trace import TraceRequest
from baltoro.bench.trace_make import AgentShape, MixedShape, agent_trace, mixed_trace
from baltoro.cache.retention import RETENTION_NAMES
from baltoro.model.config import K3Config

MIXED_BYTES = 10 * 10**9
AGENT_BYTES = {"roomy": 20 * 10**9, "tight": 5 * 10**9}
TOTALS = ("hit_share", "computed_share", "computed_tokens", "held_bytes", "peak_held_bytes", "evicted_states")


def mixed(shape: MixedShape | None = None, *, arena_bytes: int = MIXED_BYTES) -> dict[str, Any]:
    """By label: requests that ended without ever being retracted, by the time the faster pool was through with all."""
    trace = mixed_trace(shape or MixedShape())
    runs = {pool: replay(trace, arena_bytes, pool=pool) for pool in ("unified", "fixed")}
    labels = {pool: by_label(found) for pool, found in runs.items()}
    rows: dict[str, Any] = {}
    for one, other in zip(labels["unified"], labels["fixed"], strict=True):
        window = min(one.last_s, other.last_s)
        whole = {pool: whole_within(found, one.name, window) for pool, found in runs.items()}
        seconds = {"unified": one.last_s, "fixed": other.last_s}
        rows[one.name] = {"requests": one.requests, "window_s": window, "whole": whole, "all_ended_s": seconds}
    ratios = {name: row["whole"]["unified"] / row["whole"]["fixed"] for name, row in rows.items()}
    counts = {pool: {"retractions": found.retractions, "moves": found.moves} for pool, found in runs.items()}
    return {"arena_bytes": arena_bytes, "ratios": ratios, "phases": rows, "runs": counts}


def agent(shape: AgentShape | None = None, *, arenas: dict[str, int] | None = None) -> dict[str, Any]:
    """Totals by arena and policy; `none` is an engine without a prefix cache. `computed_over_none`: prompt tokens
    computed, over those that it computes."""
    trace = agent_trace(shape or AgentShape())
    found: dict[str, Any] = {}
    for arena, size in (arenas or AGENT_BYTES).items():
        none = replay(trace, size, prefix_cache=False)
        rows = {"none": _totals(none, none)}
        for policy in RETENTION_NAMES:
            rows[policy] = _totals(replay(trace, size, retention=policy), none)
        found[arena] = {"arena_bytes": size, "policies": rows}
    return found


def arrivals(shared: int = 4096, tail: int = 20000) -> dict[str, Any]:
    """Tokens found at each arrival of a beginning of `shared` tokens, when nothing marked it, and when a request that
    ended there had left a checkpoint at the fork."""

    def cached(*own: int) -> list[int]:
        trace = [
            TraceRequest(id=str(at), arrival=100.0 * at, prefix="shared", shared=shared, own=tokens, output=4)
            for at, tokens in enumerate(own)
        ]
        return [one.num_cached for one in replay(trace, AGENT_BYTES["roomy"]).outcomes]

    return {"shared": shared, "tail": tail, "unmarked": cached(tail, tail, tail), "planted": cached(1, tail)}


def replay(trace: list[TraceRequest], arena_bytes: int, **options: Any) -> Replayed:
    """One trace on one rank of eight."""
    model = _model()
    defaults = {"max_running": 512, "max_batch_tokens": 8192, "max_waiting": len(trace) + 1}
    config = replay_config(model, arena_bytes=arena_bytes, **(defaults | options))
    return Replay(trace, config, model).run()


def _totals(found: Replayed, none: Replayed) -> dict[str, Any]:
    totals = found.totals()
    return {key: totals[key] for key in TOTALS} | {
        "computed_over_none": found.computed_tokens / none.computed_tokens,
        "retractions": found.retractions,
        "seconds": found.time_s,
    }


def _model() -> K3Config:
    shape = named_shape("k3")
    assert shape is not None
    return rank_shape(shape, 8)


TRACES: dict[str, Callable[[], dict[str, Any]]] = {"mixed": mixed, "agent": agent, "arrivals": arrivals}
