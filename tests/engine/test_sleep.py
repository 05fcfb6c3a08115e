"""Sleep and wake of an engine: nothing is lost, nothing is held, twice is once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baltoro.engine.engine import Engine
from baltoro.observe import resident_bytes
from baltoro.protocol.sampling import SamplingParams
from tests.engine.stub import expected, make_engine, run, submit, tokens_of

ROWS: dict[str, dict[str, Any]] = {
    "plain": {"overlap": False},
    "overlap": {"overlap": True},
    "no cache": {"prefix_cache": False},
    "cache": {"prefix_cache": True, "hash_endpoint": 4, "track_interval": 4},
    "backed up": {
        "prefix_cache": True,
        "hash_endpoint": 4,
        "track_interval": 4,
        "host_cache_bytes": 200_000,
        "retract_to": "host",
        "overlap": True,
    },
    "fixed": {"pool": "fixed"},
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_every_request_ends_as_if_nothing_had_been(row: str, after: int) -> None:
    """Those that ran, in any state, and those that came while it slept; the arena stays where it is."""
    engine: Engine = make_engine(is_poisoned=True, **ROWS[row])
    address = engine.pool.arena.data_ptr()
    prompts = {"a": list(range(9)), "b": [5, 6], "late": list(range(20))}
    for name in ("a", "b"):
        submit(engine, name, prompts[name], max_tokens=12, temperature=0.0)
    told = [delta for _ in range(after) for delta in engine.step()]
    assert engine.sleep()["given_back_bytes"] == engine.pool.shape.total_bytes
    assert engine.sleep()["given_back_bytes"] == 0 and engine.is_asleep
    engine.audit()
    numbers = engine.stats()
    assert numbers["pages_used"] == numbers["slots_used"] == 0
    submit(engine, "late", prompts["late"], max_tokens=12, temperature=0.0)
    told += [delta for _ in range(3) for delta in engine.step()]
    assert not engine.has_work and all(delta.request_id != "late" for delta in told)
    assert engine.wake()["taken_bytes"] > 0 == engine.wake()["taken_bytes"]
    assert engine.pool.arena.data_ptr() == address
    while engine.has_work:
        told += engine.step()
        engine.audit()
    for name, prompt in prompts.items():
        found = tokens_of([delta for delta in told if delta.request_id == name])
        assert found == expected(prompt, SamplingParams(max_tokens=12, temperature=0.0)), name
    assert engine.stats()["num_retracted_reqs"] == 0, "it is no sign of a crowd"


def test_what_is_aborted_asleep_is_told() -> None:
    engine = make_engine()
    submit(engine, "a", [1, 2, 3], max_tokens=12)
    engine.step()
    engine.sleep()
    engine.step()
    engine.abort("a")
    assert engine.has_work and engine.step()[-1].finish_reason == "abort"
    assert not engine.has_work
    engine.audit()


def test_prefixes_of_the_device_are_forgotten_and_those_of_the_host_kept() -> None:
    engine = make_engine(**ROWS["backed up"], num_pages=12)
    prompt = list(range(17))
    for name in ("a", "b", "c"):
        submit(engine, name, [*prompt, *range(len(name))], max_tokens=8, temperature=0.0)
        run(engine)
    for n in range(6):  # pushes the first ones out to the host
        submit(engine, f"other{n}", [40 + n] * 20, max_tokens=8, temperature=0.0)
        run(engine)
    host = engine.stats()["host_entries"]
    assert host
    engine.sleep()
    engine.wake()
    assert engine.stats()["host_entries"] == host and engine.stats()["cache_tokens"] == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory: Linux alone")
@pytest.mark.slow
def test_memory_returns_to_the_same_number_every_cycle() -> None:
    engine = make_engine(num_pages="auto", num_slots="auto", memory_bytes=64 << 20, is_poisoned=True, max_context=500)
    awake, asleep = [], []
    for cycle in range(12):
        submit(engine, f"r{cycle}", list(range(20)), max_tokens=6)
        run(engine)
        awake.append(resident_bytes())
        engine.sleep()
        asleep.append(resident_bytes())
        engine.wake()
    size = engine.pool.shape.total_bytes
    assert size > 1 << 20 and min(awake) - max(asleep) > 0.9 * size
    assert max(awake[2:]) - awake[2] <= 1 << 20 and max(asleep[2:]) - asleep[2] <= 1 << 20
