"""Faults of other engines about the depth of states and the prefix cache (docs/spec/serving.md G.1), each with the
right value. The table of all of them is docs/ideas/public-faults.md.

The scripted model's tokens depend on every byte of state and KV, so a state of another depth changes the answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from baltoro.engine.batch import Move, Plan
from baltoro.engine.engine import Engine
from baltoro.engine.plan_builder import PlanBuilder
from baltoro.engine.prefix_key import namespace_of
from baltoro.errors import ConfigError, LeakError
from baltoro.protocol.sampling import SamplingParams
from tests.engine.late import make_late
from tests.engine.stub import StubModel, expected, make_engine, run, stub_config, submit, tokens_of
from tests.engine.truth import cache_of, check_tree, make_moves, nodes_of

cached_engine = partial(make_engine, prefix_cache=True, pool="unified")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(11 * i + 7 * seed + i * i) % 59 for i in range(length)]


def ask(engine: Engine, prompt: Sequence[int], name: str = "a", max_tokens: int = 4) -> tuple[int, list[int]]:
    """(cached tokens, answer) of a greedy request alone; the answer is the right one."""
    submit(engine, name, prompt, max_tokens=max_tokens)
    found = run(engine)[name, 0]
    params, config = SamplingParams(temperature=0.0, max_tokens=max_tokens), engine.model_config
    assert tokens_of(found) == expected(prompt, params, config=config)
    return found[-1].num_cached_tokens, tokens_of(found)


@pytest.mark.parametrize(
    ("page_size", "endpoint", "chunk", "step"), [(8, 8, 4, 8), (16, 16, 4, 16), (16, 8, 16, 16), (4, 24, 16, 48)]
)
def test_a_state_stands_on_a_node_of_its_own_depth(page_size: int, endpoint: int, chunk: int, step: int) -> None:
    """G-01: one absolute grid, lcm(chunk, endpoint), for nodes and states, whatever the page, wherever a hit ended."""
    engine = cached_engine(
        StubModel(state_chunk=chunk),
        page_size=page_size,
        num_pages=1024 // page_size,
        num_slots=12,
        hash_endpoint=endpoint,
        track_interval=step,
        max_batch_tokens=50,
    )
    prompt = prompt_of(64 + 16 + 1)
    assert ask(engine, prompt, max_tokens=20)[0] == 0
    longer = [*prompt, *expected(prompt, SamplingParams(temperature=0.0, max_tokens=20)), *prompt_of(40, 1)]
    assert ask(engine, longer)[0] == 100 // step * step
    other = [*prompt[:64], *prompt_of(90, 2)]
    hits = [ask(engine, other[:-1])[0], ask(engine, other)[0]]
    assert hits[0] <= 64 and hits[1] == 153 // step * step
    depths = check_tree(engine)
    assert depths and all(depth % step == 0 for depth in depths)
    tree, (node, tokens) = cache_of(engine).tree, nodes_of(engine)[0]
    with pytest.raises(LeakError, match="endpoint"):
        tree.insert(b"", array("q", tokens), node.depth - 1, node.pages, state=1, kind="prefill")


def test_what_a_chunk_writes_is_found_only_when_it_has_landed() -> None:
    """G-03: four chunks on a late device; at no time does the tree have more than what is committed."""
    engine = cached_engine(
        StubModel(state_chunk=16), hash_endpoint=16, track_interval=16, max_batch_tokens=16, overlap=True, num_slots=6
    )
    make_late(engine, seed=3)
    prompt = prompt_of(70)
    submit(engine, "first", prompt, max_tokens=2)
    (request,) = engine.scheduler.roster.holders()
    seen = set()
    while not request.num_output:
        engine.step()
        depth = max([node.depth for node, _ in nodes_of(engine)], default=0)
        seen.add(depth)
        assert depth <= request.num_computed
        engine.audit()
    assert {16, 32, 48} <= seen, "chunks are found as they land"
    submit(engine, "second", prompt, max_tokens=2)
    found = run(engine)["second", 0]
    assert found[-1].num_cached_tokens == 64
    assert tokens_of(found) == expected(prompt, SamplingParams(temperature=0.0, max_tokens=2))
    check_tree(engine)
    engine.close()


def test_tracked_states_of_one_forward_are_those_of_requests_alone() -> None:
    """G-08: 70, 130 and 200 tokens cross boundaries in one forward."""
    model = StubModel(state_chunk=64)
    engine = cached_engine(model, page_size=16, num_slots=12, hash_endpoint=64, track_interval=64, max_batch_tokens=400)
    for n in (70, 130, 200):
        submit(engine, f"r{n}", prompt_of(n, n), max_tokens=1)
    run(engine)
    assert len(model.contexts[0].spans) == 3
    assert check_tree(engine) == [64, 128, 192]


def test_the_restored_slot_is_the_one_of_the_depth_of_the_hit() -> None:
    """G-10: pages of 16, grid 64, a hit at 128 where a state at 64 stands too."""
    engine = cached_engine(
        StubModel(state_chunk=64), page_size=16, num_slots=6, hash_endpoint=64, track_interval=64, max_batch_tokens=64
    )
    prompt = prompt_of(140)
    ask(engine, prompt[:70], max_tokens=1)
    ask(engine, prompt, max_tokens=1)
    assert check_tree(engine) == [64, 128]
    (slot,) = [node.state for node, _ in nodes_of(engine) if node.depth == 128]
    submit(engine, "again", prompt)
    plan = engine.scheduler.plan()
    assert plan is not None and slot is not None
    memory = engine.scheduler.memory
    (copy,) = [move for move in plan.moves if move.kind == "copy_slot"]
    assert (copy.source, copy.target) == (memory.physical_slot(slot), plan.spans[0].slot)
    assert plan.spans[0].start == 128


def test_no_checkpoint_is_booked_for_a_boundary_behind_the_span() -> None:
    """G-12: tokens 70 to 100; 64 lies before, 128 behind, and nothing is written for either."""
    engine = cached_engine(StubModel(state_chunk=64), page_size=16, num_slots=6, hash_endpoint=64, track_interval=64)
    submit(engine, "a", prompt_of(150))
    engine.step()
    (request,) = engine.scheduler.running
    depths = []
    for length in (30, 58):
        request.num_planned, builder = 70, PlanBuilder(length, 1)
        builder.add(request, length)
        depths.append([due.depth for due in engine.scheduler.memory.snapshots(builder.drafts[0])])
    assert depths == [[], [128]]


def test_a_step_without_spans_writes_nothing() -> None:
    """G-14: free and cached memory is what it was before an empty step."""
    engine = cached_engine(hash_endpoint=4, track_interval=4)
    ask(engine, prompt_of(21))
    make_moves(engine)
    before = engine.pool.arena.clone()
    engine.runner.run(Plan((), 0))
    assert torch.equal(engine.pool.arena, before)
    assert ask(engine, prompt_of(21))[0] == 20


def test_relayed_tokens_go_with_their_request_when_rows_move_up() -> None:
    """G-15: three requests decode in one overlapped batch, the middle one ends first; its row goes to the third."""
    model = StubModel()
    engine = cached_engine(model, overlap=True, hash_endpoint=4, track_interval=4)
    make_late(engine, seed=5)
    for n, max_tokens in enumerate((12, 3, 12)):
        submit(engine, f"r{n}", prompt_of(5, n), max_tokens=max_tokens)
    deltas = run(engine)
    for n, max_tokens in enumerate((12, 3, 12)):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        assert tokens_of(deltas[f"r{n}", 0]) == expected(prompt_of(5, n), params)
    assert {3, 2} <= {ctx.num_decodes for ctx in model.contexts}
    engine.close()


@pytest.mark.parametrize("is_poisoned", [False, True])
def test_a_fresh_request_starts_from_nothing_in_a_used_slot(is_poisoned: bool) -> None:
    """G-07, G-17: A, then B in the only slots, then A again; what lies in a slot before is a number, or NaN."""
    for cache in (False, True):
        engine = make_engine(
            num_slots=2, is_poisoned=is_poisoned, prefix_cache=cache, hash_endpoint=4, track_interval=4
        )
        if not is_poisoned:
            engine.pool.arena.view(torch.float32).fill_(7.0)
        for seed, length in ((1, 23), (2, 31), (1, 23), (3, 2)):
            ask(engine, prompt_of(length, seed))


@pytest.mark.parametrize(("length", "hit"), [(128, 64), (130, 128), (192, 128), (193, 192)])
def test_prompts_of_whole_chunks_reach_the_host(length: int, hit: int) -> None:
    """G-18: of 128 tokens 127 can be found, so 64 of them; of 130, 128."""
    engine = _on_host(length)
    assert ask(engine, prompt_of(length))[0] == hit
    assert engine.stats()["host_loaded_tokens"] == hit


def test_the_key_of_a_state_is_that_of_its_depth() -> None:
    """G-19: endpoint 32, 104 tokens read at once: states at 64 (passed) and 96 are found under their own keys, on the
    device and on the host."""
    prompt = prompt_of(104)
    engine = cached_engine(
        StubModel(state_chunk=32),
        page_size=16,
        num_slots=8,
        hash_endpoint=32,
        track_interval=32,
        retention="interval",
        max_batch_tokens=200,
    )
    ask(engine, prompt[:70])
    ask(engine, prompt)
    tree = cache_of(engine).tree
    assert check_tree(engine) == [64, 96]
    assert [tree.match(_name(engine), array("q", prompt), limit).depth for limit in (63, 64, 95, 96, 103)] == [
        0,
        64,
        64,
        96,
        96,
    ]
    digests = tree.digests(_name(engine), array("q", prompt), 0, 96)
    assert [node.digest for node, _ in sorted(nodes_of(engine), key=lambda item: item[0].depth)][:3] == digests


@pytest.mark.parametrize(("mla_layers", "hit"), [((2, 4), 20), ((), 20), ((0, 1, 2, 3, 4), 20)])
def test_caching_works_for_every_kind_of_model_and_says_so(mla_layers: tuple[int, ...], hit: int) -> None:
    """G-21, G-35: models with states, with KV, or with both; `cached_tokens` proves it."""
    engine = cached_engine(StubModel(stub_config(mla_layers=mla_layers)), hash_endpoint=4, track_interval=4)
    assert ask(engine, prompt_of(23))[0] == 0
    assert ask(engine, prompt_of(23))[0] == hit


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": False, "host_cache_bytes": 10000},
        {"disk_cache_dir": "somewhere"},
        {"retract_to": "host"},
        {"hash_endpoint": 6, "page_size": 4},
        {"track_interval": 6, "hash_endpoint": 4},
    ],
)
def test_an_option_that_would_do_nothing_is_refused_at_the_start(options: dict[str, Any]) -> None:
    """G-21: what reads as on is on, or the start fails."""
    with pytest.raises(ConfigError):
        make_engine(**({"prefix_cache": True} | options))


def test_a_state_is_restored_once_and_before_the_first_forward() -> None:
    """G-25: a hit whose rest is read in several chunks, beside another request, on a late device."""
    engine = cached_engine(
        StubModel(), hash_endpoint=4, track_interval=400, max_batch_tokens=8, overlap=True, num_slots=6, num_pages=60
    )
    make_late(engine, seed=7)
    plans: list[Plan] = []
    launch = engine.runner.launch

    def noting(plan: Plan) -> Any:
        plans.append(plan)
        return launch(plan)

    engine.runner.launch = noting  # type: ignore[method-assign]
    ask(engine, prompt_of(22))
    plans.clear()
    submit(engine, "other", prompt_of(15, 1), max_tokens=9)
    submit(engine, "hit", [*prompt_of(21), *prompt_of(20, 2)], max_tokens=2)
    found = run(engine)["hit", 0]
    assert found[-1].num_cached_tokens == 20
    assert tokens_of(found) == expected(
        [*prompt_of(21), *prompt_of(20, 2)], SamplingParams(temperature=0.0, max_tokens=2)
    )
    spans = [(plan, span) for plan in plans for span in plan.spans if span.request.request_id == "hit"]
    first, slot = spans[0]
    assert len(spans) >= 3 and slot.start == 20
    restores = [plan for plan in plans if _restores(plan.moves, slot.slot)]
    assert restores == [first]
    engine.close()


def test_a_hit_on_the_host_ends_where_every_kind_has_it() -> None:
    """G-27: the host has the KV of 128 tokens and the state of 64 only: a hit of 64."""
    engine = _on_host(140, "interval")
    cache, prompt = cache_of(engine), prompt_of(140)
    assert cache.tier is not None
    book = cache.tier.book
    above, deep = cache.tree.digests(_name(engine), array("q", prompt), 0, 128)
    entry = book.lookup(deep)
    assert entry is not None and entry.state is not None and book.lookup(above) is not None
    book.drop(deep)
    ticket = book.reserve(deep, above, 128, False)  # the same block again, without its state
    assert ticket.entry is not None and ticket.entry.block == entry.block
    book.land(ticket)
    assert ask(engine, prompt)[0] == 64


def _on_host(length: int, retention: str = "turns") -> Engine:
    """An engine that has answered prompt_of(length) and then lost everything to the host."""
    engine = cached_engine(
        StubModel(state_chunk=64),
        page_size=16,
        num_slots=6,
        hash_endpoint=64,
        track_interval=64,
        max_batch_tokens=64,
        host_cache_bytes=200000,
        retention=retention,
    )
    ask(engine, prompt_of(length), max_tokens=1)
    memory = engine.scheduler.memory
    cache_of(engine).give_up(memory.books.pages.count + 1, 0)
    make_moves(engine)
    assert not nodes_of(engine)
    engine.audit()
    return engine


def _restores(moves: Sequence[Move], slot: int) -> bool:
    return any(move.kind == "copy_slot" and move.target == slot for move in moves)


def _name(engine: Engine) -> bytes:
    return namespace_of(None, "", engine.scheduler.policy_version)
