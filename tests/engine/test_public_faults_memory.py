"""Faults of other engines about leaks, allocation, abort and the unified pool (docs/spec/serving.md G.2, G.3), each
with the right value. The table of all of them is docs/ideas/public-faults.md.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from functools import partial

import pytest

from baltoro.engine.engine import Engine
from baltoro.engine.plan_builder import ALIGNMENT, PlanBuilder
from baltoro.engine.prefix_key import namespace_of
from baltoro.errors import InvariantError, QueueFull
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from tests.engine.late import Gate
from tests.engine.stub import StubModel, expected, make_engine, run, stub_config, submit, tokens_of
from tests.engine.test_public_faults import ask, prompt_of
from tests.engine.truth import cache_of, check_tree, make_moves

cached_engine = partial(make_engine, prefix_cache=True, pool="unified", hash_endpoint=4, track_interval=8)
GREEDY = partial(SamplingParams, temperature=0.0)


def used(engine: Engine) -> tuple[int, int]:
    books = engine.scheduler.memory.books
    return books.pages.num_used, books.slots.num_used


@pytest.mark.parametrize("pool", ["fixed", "unified"])
def test_refusals_leave_the_counts_of_the_start(pool: str) -> None:
    """G-31: a line that is full, and a request for which there is no room, step after step. (Of a hundred refusals by
    the books themselves: test_unified.py.)"""
    engine = cached_engine(pool=pool, num_slots=2, max_running=4, max_waiting=3, num_pages=20, max_context=64)
    submit(engine, "long", prompt_of(40), max_tokens=20)
    engine.step()
    for n in range(30):
        with suppress(QueueFull):
            submit(engine, f"r{n}", prompt_of(50, n), max_tokens=2)
        engine.step()
        engine.audit()
        if n == 3:
            assert engine.stats()["num_queue_reqs"] == 3 and engine.stats()["num_running_reqs"] == 1
    run(engine)
    engine.flush()
    assert used(engine) == (0, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_conversation_that_ends_in_flight_leaves_no_tracking_slot(overlap: bool) -> None:
    """G-32: two turns, the second aborted while a step that writes a snapshot is on the device."""
    engine = cached_engine(overlap=overlap, max_batch_tokens=8, num_slots=6)
    _, answer = ask(engine, prompt_of(21), max_tokens=5)
    for steps in range(1, 7):
        submit(engine, "turn 2", [*prompt_of(21), *answer, *prompt_of(20, steps)], max_tokens=9)
        for _ in range(steps):
            engine.step()
        engine.abort("turn 2")
        engine.audit()
        found = run(engine)["turn 2", 0]
        assert found[-1].finish_reason == "abort"
        tree = cache_of(engine).tree.stats()
        assert engine.stats()["slots_used"] == tree.num_states and not tree.num_pins
    check_tree(engine)
    engine.flush()
    assert used(engine) == (0, 0)
    engine.close()


@pytest.mark.parametrize("mla_layers", [(), (0, 1, 2, 3, 4)])
def test_models_with_one_kind_of_state_run_with_everything_on(mla_layers: tuple[int, ...]) -> None:
    """G-35: no path asks for slots or pages that the model does not have."""
    config = stub_config(mla_layers=mla_layers)
    engine = cached_engine(
        StubModel(config), overlap=True, host_cache_bytes=20000, retract_to="host", retract_every=3, num_pages=16
    )
    for n in range(5):
        submit(engine, f"r{n}", [*prompt_of(13), *prompt_of(n + 1, n)], n=2, max_tokens=9)
    deltas = run(engine)
    for n in range(5):
        wanted = expected([*prompt_of(13), *prompt_of(n + 1, n)], GREEDY(max_tokens=9), config=config)
        assert tokens_of(deltas[f"r{n}", 1]) == wanted
    engine.close()


def test_an_estimate_that_was_too_good_sends_the_request_back_to_the_line() -> None:
    """G-36: the tree is full of leaves that somebody has pinned, which the estimate calls evictable."""
    engine = cached_engine(num_pages=16, max_context=64, num_slots=4, pool="fixed")
    ask(engine, prompt_of(41), max_tokens=1)
    tree, ids = cache_of(engine).tree, array("q", prompt_of(41))
    pin = tree.pin_at(namespace_of(None, "", 0), ids, 40)
    assert pin is not None
    submit(engine, "running", prompt_of(5, 1), max_tokens=12)
    told = engine.step()
    submit(engine, "two chunks", prompt_of(33, 2), max_tokens=1)
    for _ in range(5):
        told += engine.step()
        assert (engine.stats()["num_running_reqs"], engine.stats()["num_queue_reqs"]) == (1, 1)
    tree.unpin(pin)
    engine.audit()
    deltas = run(engine)
    assert tokens_of([*told, *deltas["running", 0]]) == expected(prompt_of(5, 1), GREEDY(max_tokens=12))
    assert tokens_of(deltas["two chunks", 0]) == expected(prompt_of(33, 2), GREEDY(max_tokens=1))


def test_a_cut_on_the_grid_never_stops_progress() -> None:
    """G-38: from 70 with room for 50 the aligned end is 64, behind the start; so 50 it is."""
    engine = cached_engine(num_pages=100)
    submit(engine, "a", prompt_of(300))
    (request,) = engine.scheduler.roster.holders()
    for start in (0, 1, 63, 64, 70, 127):
        for room in (1, 2, 50, 64, 65, 200):
            request.num_planned = start
            length = PlanBuilder(room, 1).fit(request, 300)
            assert 0 < length <= room
            is_short_of_grid = start + room < (start // ALIGNMENT + 1) * ALIGNMENT
            assert (start + length) % ALIGNMENT == 0 or is_short_of_grid or start + length == 300
    request.num_planned = 70
    assert PlanBuilder(50, 1).fit(request, 300) == 50


def test_the_tail_page_of_what_was_taken_ahead_comes_back() -> None:
    """G-43: pages of 16, 30 tokens, room for 17 more: three pages, and all three come back."""
    engine = make_engine(page_size=16, num_pages=10, max_batch_tokens=64)
    submit(engine, "a", prompt_of(30), max_tokens=2)
    engine.step()
    (request,) = engine.scheduler.running
    assert engine.scheduler.memory.grow(request, 30 + 17) and used(engine)[0] == 3
    engine.audit()
    run(engine)
    assert used(engine) == (0, 0)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_abort_with_the_last_chunk_in_flight_tells_no_token(prefix_cache: bool) -> None:
    """G-44: the chunk that samples the first token is on the device when the abort comes."""
    engine = cached_engine(prefix_cache=prefix_cache, overlap=True, max_batch_tokens=8)
    gate = Gate(engine)
    submit(engine, "a", prompt_of(22), max_tokens=9)
    engine.step()
    (request,) = engine.scheduler.running
    assert (request.num_computed, request.num_planned) == (8, 16)
    gate.close()
    plan = engine.scheduler.plan()
    assert plan is not None and plan.spans[0].draw is not None
    ticket = engine.runner.launch(plan)
    engine.abort("a")
    gate.open()
    engine.loop.settle()
    engine.scheduler.commit(plan, ticket.wait())
    found = run(engine)["a", 0]
    assert [(delta.token_ids, delta.finish_reason) for delta in found] == [((), "abort")]
    engine.flush()
    assert used(engine) == (0, 0)
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_ends_a_long_request_within_two_steps(overlap: bool) -> None:
    """G-47: what the server does when a client is gone."""
    engine = cached_engine(overlap=overlap, max_context=160)
    submit(engine, "long", prompt_of(9), max_tokens=140)
    for _ in range(5):
        engine.step()
    engine.abort("long")
    for _ in range(2):
        engine.step()
    assert engine.stats()["num_running_reqs"] == 0 and not engine.has_work
    engine.close()


def test_memory_of_an_ended_request_stays_until_the_step_that_writes_it_is_back() -> None:
    """G-49: it ends in step n while n+1 is on the device; who comes next gets its row and memory after n+1."""
    engine = make_engine(overlap=True, num_slots=1, num_pages=8, max_context=32)
    gate = Gate(engine)
    third = expected(prompt_of(6, 2), GREEDY(max_tokens=3))[2]
    submit(engine, "a", prompt_of(6, 2), max_tokens=20, stop_token_ids=[third])
    submit(engine, "b", prompt_of(7, 1), max_tokens=5)
    deltas: list[TokenDelta] = []
    while not any(delta.finish_reason for delta in deltas):
        before = used(engine)
        deltas = engine.step()
    assert before[1] and engine.loop.is_in_flight, "the over-run row is still on its way"
    assert used(engine) >= before
    gate.close()
    assert engine.scheduler.plan() is None, "nothing of it can be had yet"
    gate.open()
    deltas = run(engine)["b", 0]
    assert tokens_of(deltas) == expected(prompt_of(7, 1), GREEDY(max_tokens=5))
    engine.close()


def test_memory_is_given_back_once() -> None:
    """G-50: a second release finds nothing, and one in flight is refused; the tree's slot is nobody else's."""
    engine = cached_engine(overlap=True)
    submit(engine, "a", prompt_of(9), max_tokens=3)
    engine.step()
    (request,) = engine.scheduler.running
    memory = engine.scheduler.memory
    with pytest.raises(InvariantError, match="in flight"):
        memory.release(request)
    run(engine)
    before = used(engine)
    memory.release(request)
    engine.audit()
    assert used(engine) == before
    engine.close()


@pytest.mark.parametrize("retract_to", ["host", "recompute"])
def test_all_can_be_retracted_flushed_and_resumed(retract_to: str) -> None:
    """G-51: after taking everybody's memory a flush empties the pools, and everybody goes on rightly."""
    engine = cached_engine(overlap=True, num_slots=8, host_cache_bytes=200000, retract_to=retract_to)
    for n in range(4):
        submit(engine, f"r{n}", prompt_of(10 + n, n), max_tokens=12)
    told = [delta for _ in range(4) for delta in engine.step()]
    engine.loop.settle()
    while engine.scheduler.running:
        engine.scheduler.retraction.retract(engine.scheduler.running[-1])
    engine.audit()
    engine.flush()
    assert used(engine) == (0, 0)
    engine.audit()
    deltas = run(engine)
    for n in range(4):
        found = [delta for delta in told if delta.request_id == f"r{n}"] + deltas[f"r{n}", 0]
        assert tokens_of(found) == expected(prompt_of(10 + n, n), GREEDY(max_tokens=12))
    assert engine.stats()["num_backups"] == (4 if retract_to == "host" else 0)
    engine.close()


def test_a_copy_to_the_host_names_places_of_the_moment() -> None:
    """G-52, G-53: blocks have moved before a prefix goes to the host, and while a step is in flight none moves."""
    engine = cached_engine(num_pages=14, num_slots=3, max_context=48, host_cache_bytes=200000, overlap=True)
    prompts = [prompt_of(9 + 5 * (n % 5), n % 5) for n in range(15)]
    for n, prompt in enumerate(prompts):
        submit(engine, f"r{n}", prompt, max_tokens=6)
    deltas = run(engine)
    for n, prompt in enumerate(prompts):
        assert tokens_of(deltas[f"r{n}", 0]) == expected(prompt, GREEDY(max_tokens=6))
    stats = engine.stats()
    assert int(str(stats["num_moves"])) and int(str(stats["host_loaded_tokens"]))
    make_moves(engine)
    check_tree(engine)
    engine.close()
