"""Is it alive, is it ready, what does it do: /health, /health_generate, /metrics and the numbers behind them.

In: what handlers count, what the engine answers to a query. Out: status codes, a Prometheus page.
Invariants: names are those of SGLang's metrics with the prefix `baltoro:`; a registry belongs to one application, so
several can live in one process.
The engine's numbers are named in `engine_numbers.py`. Source: spec/serving.md F.6 for the names.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from baltoro.observe import Rate
from baltoro.server.engine_numbers import PREFIX, EngineNumbers

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LATENCY_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """All numbers of one server. Single writer: the event loop of that server."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._rate = Rate()
        self._engine = EngineNumbers(model_name)
        self._registry.register(self._engine)
        self._throughput = self._gauge("gen_throughput", "tokens made per second, over the last ten seconds")
        self._prompt = self._counter("prompt_tokens", "tokens of prompts")
        self._generation = self._counter("generation_tokens", "tokens made")
        self._cached = self._counter("cached_tokens", "tokens of prompts found in the prefix cache")
        self._requests = self._counter("num_requests", "requests that were accepted")
        self._aborted = self._counter("num_aborted_requests", "requests that ended before their answer did")
        self._first = self._histogram("time_to_first_token_seconds", "request to first token", _LATENCY_S)
        self._between = self._histogram("inter_token_latency_seconds", "one token to the next", _STEP_S)
        self._whole = self._histogram("e2e_request_latency_seconds", "request to last token", _LATENCY_S)

    def accepted(self) -> None:
        """A request went to the engine."""
        self._requests.inc()

    def started(self, num_prompt: int, num_cached: int, wait_s: float) -> None:
        """The first token of a request is here."""
        self._prompt.inc(num_prompt)
        self._cached.inc(num_cached)
        self._first.observe(wait_s)

    def produced(self, num_tokens: int, wait_s: float | None) -> None:
        """More tokens of a request are here, `wait_s` after the ones before (None: the first ones)."""
        self._generation.inc(num_tokens)
        self._rate.add(num_tokens)
        if wait_s is not None and num_tokens:
            self._between.observe(wait_s / num_tokens)

    def ended(self, total_s: float, *, is_aborted: bool) -> None:
        """A request is over."""
        if is_aborted:
            self._aborted.inc()
        else:
            self._whole.observe(total_s)

    def page(self, engine: dict[str, Any]) -> bytes:
        """The metrics page; `engine` is its answer to a query; when it is empty, the last one counts."""
        self._throughput.set(self._rate.per_second())
        if engine:
            self._engine.answer = engine
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ["model_name"], registry=self._registry).labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name"], registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        whole = Histogram(PREFIX + name, text, ["model_name"], registry=self._registry, buckets=buckets)
        return whole.labels(self._model_name)
