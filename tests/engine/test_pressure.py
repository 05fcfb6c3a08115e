"""What an engine tells a client that can hold back, and what a throttle makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from baltoro.engine.pressure import Pressure, pressure, send_room
from tests.engine.stub import make_engine, run, submit

CALM = Pressure(
    active=3, queued=1, max_running=4, page_share=0.2, slot_share=0.3, is_unified=True, retractions=5
)  # fmt: skip


@pytest.mark.parametrize("pool", ["unified", "fixed"])
def test_pressure_counts_requests_and_what_only_they_hold(pool: Literal["unified", "fixed"]) -> None:
    engine = make_engine(prefix_cache=True, hash_endpoint=4, track_interval=8, pool=pool, max_running=2)
    submit(engine, "past", range(20))
    run(engine)
    idle = pressure(engine.scheduler)
    assert (idle.active, idle.queued, idle.pool_share) == (0, 0, 0.0)  # what the cache holds counts as free
    assert engine.scheduler.memory.books.pages.num_used > 0
    for name in "abc":
        submit(engine, name, range(30, 42))
    engine.step()
    now, books = pressure(engine.scheduler), engine.scheduler.memory.books
    assert (now.active, now.queued, now.max_running) == (2, 1, 2)
    assert now.page_share == pytest.approx(6 / books.pages.count)
    assert now.slot_share == pytest.approx(2 / books.slots.count)
    both = now.page_share + now.slot_share if pool == "unified" else max(now.page_share, now.slot_share)
    assert now.pool_share == pytest.approx(both)
    assert engine.stats()["pool_pressure"] == pytest.approx(both)
    run(engine)


def test_a_throttle_fills_the_free_places_and_a_short_line() -> None:
    assert send_room(CALM, queue=8) == 8
    assert send_room(replace(CALM, queued=50)) == 0


def test_a_throttle_sends_nothing_into_a_full_pool_or_after_a_retraction() -> None:
    assert send_room(replace(CALM, page_share=0.6, slot_share=0.3)) == 0
    assert send_room(replace(CALM, page_share=0.6, slot_share=0.3, is_unified=False)) > 0
    assert send_room(replace(CALM, retractions=6), CALM) == 0
    assert send_room(CALM, CALM) > 0
