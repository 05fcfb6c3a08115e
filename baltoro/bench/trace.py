"""Request traces: JSON lines that say who asked what and when, with the token ids or a recipe for them.

    {"id": "a", "arrival": 0.0, "prefix": "system", "shared": 4096, "own": 300, "output": 120}
    {"id": "b", "arrival": 1.5, "after": "a", "own": 80, "output": 200, "label": "day"}
    {"id": "c", "arrival": 1.6, "after": "a", "keep": 4200, "own": 64, "output": 200}
    {"id": "d", "arrival": 2.0, "prompt": [17, 4, 9], "output": 32}

id       name, once in a trace
arrival  seconds since the start; a request with `after` comes in when that one has ended, if that is later
output   tokens it generates
prompt   its token ids; or instead, in this order of the prompt:
prefix   name of a text that many requests begin with, and `shared`, how much of it
after    an earlier request whose prompt and output come first (the next turn; two of them are a fork); `keep`: only so
         many tokens of it
own      tokens that nobody else has
label    by which results are counted

In: a file. Out: TraceRequests in order of arrival, and the ids that they stand for: random ones, made from the names,
the same on every machine. Errors: ConfigError with the number of the line.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from baltoro.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line of a trace; the fields are those of the file."""

    id: str
    arrival: float
    output: int
    prompt: tuple[int, ...] = ()
    prefix: str = ""
    shared: int = 0
    after: str = ""
    keep: int = 0
    own: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        self._need(bool(self.id), "needs an id")
        self._need(self.output >= 1, "generates at least one token")
        self._need(min(self.arrival, self.shared, self.keep, self.own) >= 0, "has a number below 0")
        self._need(bool(self.prefix) == bool(self.shared), "needs prefix and shared together")
        self._need(not (self.prefix and self.after), "goes on from a prefix or after a request, not both")
        self._need(not self.keep or bool(self.after), "can keep only what it goes on after")
        parts = bool(self.shared or self.after or self.own)
        self._need(bool(self.prompt) != parts, "has either a prompt or parts of one")

    def _need(self, is_good: bool, what: str) -> None:
        if not is_good:
            raise ConfigError(f"request {self.id!r} {what}")


class TraceText:
    """The ids of each request. A text is dropped when the last request that goes on after it was asked for."""

    def __init__(self, trace: Iterable[TraceRequest], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._uses = Counter(request.after for request in trace if request.after)
        self._texts: dict[str, array[int]] = {}

    def spell(self, request: TraceRequest) -> tuple[array[int], array[int]]:
        """(prompt, output); once for each request, after the one that it goes on from."""
        output = self.words(f"output of {request.id}", request.output)
        if request.prompt:
            prompt = array("q", request.prompt)
        elif request.after:
            text = self._texts[request.after]
            prompt = text[: request.keep] if request.keep else text[:]
            self._uses[request.after] -= 1
            if not self._uses[request.after]:
                del self._texts[request.after]
        else:
            prompt = self.words(f"prefix {request.prefix}", request.shared)
        prompt += self.words(f"own of {request.id}", request.own)
        if self._uses[request.id]:
            self._texts[request.id] = prompt + output
        return prompt, output

    def words(self, name: str, count: int) -> array[int]:
        """The first `count` ids of the endless random text called `name`."""
        seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
        return array("q", np.random.default_rng(seed).integers(0, self._vocab_size, count, dtype=np.int64).tobytes())


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a file, by arrival. Errors: ConfigError with the line that is wrong."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; `baltoro cache-trace {path} --make agent` writes one")
    known = {field.name for field in fields(TraceRequest)}
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
            if not isinstance(said, dict) or not known.issuperset(said):
                raise ConfigError(f"is no object with some of: {', '.join(sorted(known))}")
            if "prompt" in said:
                said["prompt"] = tuple(said["prompt"])
            found.append(TraceRequest(**said))
        except (ValueError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    check_trace(found)
    return sorted(found, key=lambda request: request.arrival)


def check_trace(trace: Sequence[TraceRequest]) -> None:
    """Names are there once, and every request goes on after one above it. Errors: ConfigError."""
    known: set[str] = set()
    for request in trace:
        if request.id in known:
            raise ConfigError(f"request {request.id!r} is in the trace twice")
        if request.after and request.after not in known:
            raise ConfigError(f"request {request.id!r} goes on after {request.after!r}, which is not above it")
        known.add(request.id)


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    """One line a request; fields that say nothing are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(_said(request)) + "\n" for request in trace), encoding="utf-8")


def _said(request: TraceRequest) -> dict[str, Any]:
    always = ("id", "arrival", "output")
    return {name: value for name, value in asdict(request).items() if name in always or value}
