"""Makes traces of two kinds, from a seed.

agent  sessions that begin with one long system prompt and grow turn by turn; now and then one forks: a second
       conversation goes on from the same turn (a tool called twice, an answer asked for again)
mixed  many short requests, then few long ones, then both at once: what the border between slots and pages suffers from

In: sizes. Out: TraceRequests by arrival. Nothing is shared between the requests of a mixed trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from baltoro.bench.trace import TraceRequest
from baltoro.errors import ConfigError

KINDS = ("agent", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShape:
    """Tokens of a session: `own` and `output` are means of a turn, drawn between half and one and a half of it."""

    conversations: int = 24
    turns: int = 12
    system: int = 6000
    own: int = 250
    output: int = 200
    fork_share: float = 0.1
    begun_per_s: float = 1.0
    pause_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedShape:
    """Prompt and output tokens of both kinds, requests of each wave, and how long a wave lasts."""

    short: tuple[int, int] = (150, 150)
    long: tuple[int, int] = (32000, 600)
    num_short: int = 1000
    num_long: int = 48
    wave_s: float = 200.0


def agent_trace(shape: AgentShape, seed: int = 0) -> list[TraceRequest]:
    """Sessions come one after the other and overlap; turns follow each other with a pause."""
    draw, found, begins = Random(seed), [], 0.0
    for number in range(shape.conversations):
        begins += draw.expovariate(shape.begun_per_s)
        at, last = begins, ""
        for turn in range(shape.turns):
            name = f"s{number}.{turn}"
            own, output = _around(draw, shape.own), _around(draw, shape.output)
            start = {"after": last} if last else {"prefix": "system", "shared": shape.system}
            found.append(TraceRequest(id=name, arrival=at, own=own, output=output, **start))
            if last and draw.random() < shape.fork_share:
                own, output = _around(draw, shape.own), _around(draw, shape.output)
                found.append(TraceRequest(id=f"{name}.fork", arrival=at, after=last, own=own, output=output))
            last = name
            at += draw.expovariate(1 / shape.pause_s)
    return sorted(found, key=lambda request: request.arrival)


def mixed_trace(shape: MixedShape, seed: int = 0) -> list[TraceRequest]:
    """Three waves of equal length; all requests of one come at its start, the two kinds evenly mixed in the last."""
    draw = Random(seed)
    short, long = ["short"] * shape.num_short, ["long"] * shape.num_long
    both = short[: shape.num_short // 2] + long[: shape.num_long // 2]
    draw.shuffle(both)
    found = []
    for number, (label, kinds) in enumerate((("short", short), ("long", long), ("both", both))):
        for at, kind in enumerate(kinds):
            prompt, output = shape.short if kind == "short" else shape.long
            name = f"{label}.{at}"
            own, arrival = _around(draw, prompt), number * shape.wave_s + at * 1e-6
            request = TraceRequest(id=name, arrival=arrival, own=own, output=_around(draw, output), label=label)
            found.append(request)
    return found


def make_trace(kind: str, seed: int = 0) -> list[TraceRequest]:
    """A trace of `kind` in its usual sizes. Errors: ConfigError."""
    if kind == "agent":
        return agent_trace(AgentShape(), seed)
    if kind == "mixed":
        return mixed_trace(MixedShape(), seed)
    raise ConfigError(f"there is no trace {kind!r}: make one of {', '.join(KINDS)}")


def _around(draw: Random, mean: int) -> int:
    return max(1, draw.randint(mean // 2, mean + mean // 2))
