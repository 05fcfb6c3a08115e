"""A small load: streamed completions against any OpenAI-compatible server, with the time of every token.

In: an address, prompts, output lengths. Out: a Timing per request.
Limit: the standard library's client, a thread per stream: right for tens of streams on one machine.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from baltoro.bench.record import median
from baltoro.errors import WorkerLost

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since the request was sent: first token, last token; tokens by the server's count."""

    first_s: float
    last_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first token."""
        return (self.num_tokens - 1) / max(self.last_s - self.first_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that ran side by side."""

    timings: tuple[Timing, ...]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        """All tokens over the wall time."""
        return sum(t.num_tokens for t in self.timings) / self.wall_s

    @property
    def first_s(self) -> float:
        return median([t.first_s for t in self.timings])


def stream_completion(url: str, model: str, prompt: str, max_tokens: int) -> Timing:
    """One streamed greedy completion. Errors: WorkerLost with what the server said."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=TIMEOUT_S)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    began = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise WorkerLost(f"{url} answered {reply.status}: {reply.read(500).decode(errors='replace')}")
        return _read_stream(reply, began)
    finally:
        connection.close()


def run_wave(url: str, model: str, prompts: Sequence[str], lengths: Sequence[int]) -> Wave:
    """All prompts at once."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [pool.submit(stream_completion, url, model, p, n) for p, n in zip(prompts, lengths, strict=True)]
        timings = tuple(job.result() for job in jobs)
    return Wave(timings, time.perf_counter() - began)


def _read_stream(reply: http.client.HTTPResponse, began: float) -> Timing:
    first = last = 0.0
    chunks = counted = 0
    for line in reply:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        now = time.perf_counter() - began
        event = json.loads(data)
        counted = (event.get("usage") or {}).get("completion_tokens", counted)
        if any(choice.get("text") for choice in event.get("choices") or ()):
            chunks += 1
            first, last = first or now, now
    return Timing(first, last, counted or chunks)
