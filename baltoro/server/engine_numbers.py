"""What `/metrics` says of an engine: one line a number, in the engine's own names.

In: the engine's answer to a query. Out: families for a Prometheus registry.
Invariants: a gauge is of now, a counter only grows while the engine lives (and is called NAME_total on the page, as
Prometheus wants it); what the answer does not hold is left out, so an engine without a host tier shows none.
Names are those of SGLang where it has the number (spec/serving.md F.6): "full" is KV, "mamba" is KDA state.
The page for people is docs/serving.md; a test holds it against this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "baltoro:"

GAUGES = {
    "num_running_reqs": "requests in the running batch",
    "num_queue_reqs": "requests that wait for admission",
    "max_running_reqs": "requests that may run at once",
    "pool_pressure": "how full the pool is with what only requests can give back: what a client's throttle looks at",
    "token_usage": "share of the arena's bytes that requests hold",
    "full_token_usage": "share of the KV pages that requests hold",
    "mamba_usage": "share of the state slots that requests hold",
    "max_total_num_tokens": "tokens whose KV fits if nothing else is held: the first limit",
    "kv_used_tokens": "tokens of the KV pages that requests hold",
    "kv_evictable_tokens": "tokens of the KV pages that only the prefix cache holds",
    "kv_available_tokens": "tokens of the KV pages that could be taken now without evicting",
    "max_total_num_slots": "state slots if nothing else is held: the second limit",
    "slots_held": "state slots that requests hold",
    "slots_evictable": "state slots that only the prefix cache holds",
    "slots_available": "state slots that could be taken now without evicting",
    "cache_hit_rate": "share of prompt tokens found in the prefix cache, since the start",
    "cache_tokens": "tokens whose KV can be found on the device",
    "cache_states": "state checkpoints that can be found on the device",
    "cache_tombstones": "places whose state was evicted while their KV stayed",
    "host_tokens": "tokens whose KV lies in the host tier",
    "host_max_tokens": "tokens whose KV fits into the host tier",
    "host_states": "states in the host tier",
    "host_max_states": "states that fit into the host tier",
    "host_pinned": "entries of the host tier that are being read",
    "disk_entries": "entries of the disk tier, a file each",
    "disk_bytes": "bytes of these files",
    "disk_max_bytes": "bytes that the disk tier may use",
    "disk_pending_bytes": "bytes on their way to or from the disk",
}

# on the page with _total behind the name, once
COUNTERS = {
    "cache_lookup_tokens": "prompt tokens that were looked up in the prefix cache",
    "cache_hit_tokens": "prompt tokens that were found, in whichever tier",
    "cache_evicted_tokens": "tokens whose KV the device gave up",
    "cache_evicted_states": "state checkpoints the device gave up on their own",
    "cache_superseded": "state checkpoints given up because a newer one on their path made them superfluous",
    "num_snapshots": "states copied at a boundary",
    "num_skipped_snapshots": "snapshots left out because no slot was to be had",
    "num_moves": "pages and slots moved to make room in the unified pool",
    "num_retracted_reqs": "times a running request lost its memory",
    "num_backups": "of these, with a copy on the host",
    "host_written_total": "entries written to the host tier",
    "host_spilled_total": "entries the host tier gave up",
    "host_refused_total": "entries the host tier had no room for",
    "host_loaded_tokens": "tokens whose KV came back from the host tier",
    "disk_written_total": "entries written to the disk tier",
    "disk_read_total": "entries read from the disk tier",
    "disk_evicted_total": "entries the disk tier gave up",
    "disk_refused_total": "entries the disk tier had no room or no time for",
    "disk_bad_total": "files of the disk tier that could not be believed, or not be written",
}


class EngineNumbers(Collector):
    """The engine's last answer. Single writer: the event loop of a server."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.answer: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        """Families, in the order of the tables."""
        for name, text in GAUGES.items():
            if (value := self._value(name)) is not None:
                gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
                gauge.add_metric([self._model_name], value)
                yield gauge
        for name, text in COUNTERS.items():
            if (value := self._value(name)) is not None:
                counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
                counter.add_metric([self._model_name], value)
                yield counter

    def _value(self, name: str) -> float | None:
        value = self.answer.get(name)
        return value if isinstance(value, int | float) else None
