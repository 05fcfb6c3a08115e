"""What an engine tells of itself, what a flush leaves, and what closing an engine finishes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baltoro.cache.disk_thread import DiskThread
from baltoro.engine.config import EngineConfig
from baltoro.engine.engine import Engine
from baltoro.errors import ConfigError, ContextLengthError
from baltoro.protocol.sampling import SamplingParams
from tests.engine.stub import expected, make_engine, run, submit, tokens_of

CACHED: dict[str, Any] = {"prefix_cache": True, "hash_endpoint": 4, "track_interval": 8, "pool": "unified"}


def prompts(count: int, length: int = 40) -> list[list[int]]:
    return [[(7 * i + at * (i + 3)) % 50 for at in range(length)] for i in range(count)]


def found(engine: Engine, prompt: list[int]) -> int:
    submit(engine, "again", prompt, max_tokens=2)
    return run(engine)["again", 0][-1].num_cached_tokens


def test_used_is_what_requests_hold_and_evictable_what_only_the_cache_holds() -> None:
    engine = make_engine(**CACHED)
    [prompt] = prompts(1)
    submit(engine, "a", prompt, max_tokens=30)
    for _ in range(6):
        engine.step()
    busy = engine.stats()
    assert busy["kv_used_tokens"] >= 40 and 1 <= busy["slots_held"] < busy["max_total_num_slots"]  # type: ignore[operator]
    run(engine)
    idle = engine.stats()
    assert idle["kv_used_tokens"] == idle["slots_held"] == idle["token_usage"] == 0
    assert idle["kv_evictable_tokens"] == idle["pages_used"] * 4 > 0  # type: ignore[operator]
    assert idle["slots_evictable"] == idle["slots_used"] == idle["cache_states"] > 0  # type: ignore[operator]
    assert "host_tokens" not in idle and "disk_bytes" not in idle


def test_an_engine_without_a_cache_has_no_numbers_of_one() -> None:
    assert not any(name.startswith(("cache", "host", "disk")) for name in make_engine().stats())


def small(folder: Path, **options: Any) -> Engine:
    """Device, host and disk that hold a few prompts each."""
    return make_engine(**CACHED | {"num_pages": 30, "host_cache_bytes": 6_000, "disk_cache_dir": str(folder)} | options)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flush_reaches_every_tier_even_in_the_middle_of_a_step(tmp_path: Path, overlap: bool) -> None:
    engine = small(tmp_path, overlap=overlap)
    several = prompts(8)
    for at, prompt in enumerate(several[:-1]):
        submit(engine, f"r{at}", prompt, max_tokens=4)
        run(engine)
    submit(engine, "runs", several[-1], max_tokens=12)
    engine.step()
    engine.step()
    before = engine.stats()
    assert before["host_written_total"] and before["disk_written_total"], "the pools are small enough"
    engine.flush()
    deltas = run(engine)["runs", 0]
    assert deltas[-1].finish_reason == "length"
    assert engine.stats()["host_tokens"] == engine.stats()["disk_entries"] == 0
    assert found(engine, several[-2]) == 0
    engine.flush()
    after = engine.stats()
    assert after["pages_used"] == after["slots_used"] == after["host_tokens"] == after["disk_entries"] == 0
    assert [found(engine, prompt) for prompt in several] == [0] * 8
    engine.close()


def test_what_a_slow_disk_brings_after_a_flush_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that was under way lands when its request has long been served without it."""
    engine, several = small(tmp_path), prompts(9)
    for at, prompt in enumerate(several):
        submit(engine, f"r{at}", prompt, max_tokens=4)
        run(engine)
    while engine.stats()["disk_pending_bytes"]:  # else what is awaited may be a write that has not landed yet
        engine.scheduler.memory.poll()
    gate, is_read = threading.Event(), threading.Event()
    work: Callable[..., Any] = DiskThread.do

    def slowly(thread: DiskThread, job: Any) -> Any:
        gate.wait(30)
        done = work(thread, job)
        if job.kind == "get":
            is_read.set()
        return done

    monkeypatch.setattr(DiskThread, "do", slowly)
    submit(engine, "waits", several[0], max_tokens=4)
    assert not engine.step()
    assert engine.scheduler.waiting.head().hold.loading, "the disk was asked"  # type: ignore[union-attr]
    engine.flush()
    deltas = run(engine)["waits", 0]
    assert deltas[-1].num_cached_tokens == 0
    engine.flush()
    num_read = engine.stats()["disk_read_total"]
    gate.set()
    assert is_read.wait(30), "the read comes to its end, late"
    while engine.stats()["disk_read_total"] == num_read:
        engine.scheduler.memory.poll()
    assert found(engine, several[1]) == found(engine, several[0]) == 0
    engine.close()


def test_closing_finishes_what_the_disk_is_writing_and_lets_the_folder_go(tmp_path: Path) -> None:
    engine, several = small(tmp_path), prompts(9)
    for at, prompt in enumerate(several):
        submit(engine, f"r{at}", prompt, max_tokens=4)
        run(engine)
    with pytest.raises(ConfigError, match="another process"):
        small(tmp_path)
    engine.close()
    engine.close()
    assert not list(tmp_path.glob("*.unfinished"))
    again = small(tmp_path)
    assert again.stats()["disk_entries"] == len(list(tmp_path.glob("*.prefix"))) > 0
    submit(again, "a", several[0], max_tokens=4)
    deltas = run(again)["a", 0]
    assert deltas[-1].num_cached_tokens > 0
    assert tokens_of(deltas) == expected(several[0], SamplingParams(temperature=0.0, max_tokens=4))
    again.close()


def test_a_new_checkpoint_is_worth_more_than_old_kv() -> None:
    """In a unified pool the KV of old conversations makes room for a snapshot, so each new one finds itself again."""
    engine, hits = make_engine(**CACHED | {"num_pages": 30, "num_slots": 3}), []
    for number in range(3):
        talk = [(13 * number + 3 * at) % 50 for at in range(60)]
        for turn in range(3):
            submit(engine, "turn", talk, max_tokens=3)
            deltas = run(engine)["turn", 0]
            hits.append(deltas[-1].num_cached_tokens)
            talk = [*talk, *tokens_of(deltas), *[(turn + at) % 50 for at in range(9)]]
    assert hits == [0, 60, 72] * 3 and engine.stats()["num_skipped_snapshots"] == 0


@pytest.mark.parametrize("pool", ["unified", "fixed"])
def test_a_prompt_as_long_as_memory_allows_is_served_out_of_a_full_cache_and_a_longer_one_refused(pool: Any) -> None:
    engine = make_engine(**CACHED | {"pool": pool})
    for at, prompt in enumerate(prompts(6)):
        submit(engine, f"r{at}", prompt, max_tokens=4)
        run(engine)
    assert engine.plan.max_context == 160
    long = [at % 50 for at in range(159)]
    submit(engine, "fits", long, max_tokens=1)
    assert run(engine, max_steps=30)["fits", 0][-1].finish_reason == "length"
    with pytest.raises(ContextLengthError, match="160 together"):
        submit(engine, "never", [*long, 1], max_tokens=1)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"retention": "all"}, "turns, interval"),
        ({"disk_cache_dir": "x"}, "host_cache_bytes"),
        ({"retract_to": "host"}, "host_cache_bytes"),
        ({"prefix_cache": False, "host_cache_bytes": 1 << 20}, "prefix_cache is off"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**options)
