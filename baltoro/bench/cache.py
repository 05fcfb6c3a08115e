"""What the books cost: plan and commit beside a full tree, matching a long prompt, and what overlap hides of them.

In: numbers of requests, tokens, rounds. Out: samples and medians, in milliseconds of wall time and of the thread's own
time (what it would be on a core of its own). The shapes are those of K3 on eight ranks; no model runs.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from baltoro.bench.books_runner import Answer, BooksRunner, StepCost
from baltoro.bench.record import median
from baltoro.bench.replay_plan import CHUNK, plan_replay
from baltoro.bench.shapes import named_shape, rank_shape
from baltoro.cache.prefix import PrefixTree
from baltoro.engine.assemble import build_books
from baltoro.engine.batch import Plan
from baltoro.engine.config import EngineConfig
from baltoro.engine.loop import Loop
from baltoro.engine.memory import Memory
from baltoro.engine.planner import arena_layout
from baltoro.engine.request import Request
from baltoro.engine.runner import Ticket
from baltoro.engine.scheduler import Scheduler
from baltoro.protocol.sampling import SamplingParams

VOCAB = 160_000
BRANCH_TOKENS = 10_240  # of each prompt that fills the tree
OUTPUT_TOKENS = 100_000  # nobody ends while it is measured


@dataclass(frozen=True, slots=True)
class Desk:
    """A scheduler with requests that all decode, beside a full tree."""

    scheduler: Scheduler
    memory: Memory
    tree: PrefixTree
    runner: BooksRunner
    draw: np.random.Generator


def full_desk(*, running: int = 256, tree_tokens: int = 1_000_000, endpoint: int = CHUNK) -> Desk:
    """`running` requests of 1000 to 1400 tokens that have read their prompts."""
    shape = named_shape("k3")
    assert shape is not None
    model = rank_shape(shape, 8)
    config = EngineConfig(
        memory_bytes=200 * 10**9, max_running=running, max_waiting=running, max_batch_tokens=2048,
        hash_endpoint=endpoint, track_interval=max(256, endpoint),
    )  # fmt: skip
    layout = arena_layout(model, torch.bfloat16, config.page_size, has_routes=config.keeps_routed_experts)
    memory = build_books(config, layout, plan_replay(config, model, layout, torch.bfloat16), chunk=CHUNK)
    assert memory.cache is not None
    desk = Desk(
        Scheduler(config, memory, max_running=running), memory, memory.cache.tree, BooksRunner({}, StepCost()),
        np.random.default_rng(0),
    )  # fmt: skip
    for _ in range(-(-tree_tokens // BRANCH_TOKENS)):
        _plant(desk, BRANCH_TOKENS)
    memory.collect_moves()
    for number in range(running):
        desk.scheduler.submit([_request(number, _ids(desk, 1000 + number * 37 % 400))])
    while True:
        plan = desk.scheduler.plan()
        assert plan is not None
        desk.scheduler.commit(plan, desk.runner.launch(plan).wait())
        if plan.num_decodes == running:
            desk.scheduler.take_deltas()
            return desk


def planning(rounds: int = 200, **sizes: int) -> dict[str, Any]:
    """Milliseconds of plan and commit for a step of decodes."""
    desk = full_desk(**sizes)
    rows: dict[str, list[float]] = {"plan_ms": [], "commit_ms": [], "both_ms": [], "both_thread_ms": []}
    gc.collect()
    for _ in range(rounds):
        began, began_thread = time.perf_counter(), time.thread_time()
        plan = desk.scheduler.plan()
        planned, planned_thread = time.perf_counter(), time.thread_time()
        assert plan is not None
        result = desk.runner.launch(plan).wait()
        back, back_thread = time.perf_counter(), time.thread_time()
        desk.scheduler.commit(plan, result)
        desk.scheduler.take_deltas()
        ended, ended_thread = time.perf_counter(), time.thread_time()
        rows["plan_ms"].append(1000 * (planned - began))
        rows["commit_ms"].append(1000 * (ended - back))
        rows["both_ms"].append(1000 * (planned - began + ended - back))
        rows["both_thread_ms"].append(1000 * (planned_thread - began_thread + ended_thread - back_thread))
    facts = {"running": len(desk.scheduler.running), "tree_tokens": desk.tree.num_tokens}
    return facts | {"medians": {key: median(row) for key, row in rows.items()}, "samples": rows}


def matching(rounds: int = 50, *, tokens: int = 100_000, **sizes: int) -> dict[str, Any]:
    """Milliseconds to match a prompt that the tree has all of."""
    desk = full_desk(**({"running": 1} | sizes))
    ids = _plant(desk, tokens // CHUNK * CHUNK)
    rows: dict[str, list[float]] = {"match_ms": [], "match_thread_ms": []}
    depth = 0
    for _ in range(rounds):
        began, began_thread = time.perf_counter(), time.thread_time()
        depth = desk.tree.match(b"bench", ids, len(ids)).depth
        rows["match_ms"].append(1000 * (time.perf_counter() - began))
        rows["match_thread_ms"].append(1000 * (time.thread_time() - began_thread))
    facts = {"tree_tokens": desk.tree.num_tokens, "depth": depth}
    return facts | {"medians": {key: median(row) for key, row in rows.items()}, "samples": rows}


class SleepingRunner:
    """A device that takes `device_s` for a step, on a thread of its own that lets go of the interpreter meanwhile."""

    def __init__(self, answers: BooksRunner, device_s: float) -> None:
        self.busy_s = 0.0
        self._answers, self._device_s = answers, device_s
        self._thread = ThreadPoolExecutor(1, "device")

    def launch(self, plan: Plan) -> Ticket:
        """Queue one step behind those before it."""
        return _Coming(self._thread.submit(self._run, plan))

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, plan: Plan) -> Answer:
        began = time.perf_counter()
        time.sleep(self._device_s)
        answer = self._answers.launch(plan)
        self.busy_s += time.perf_counter() - began
        return answer


@dataclass(frozen=True, slots=True)
class _Coming:
    future: Future[Answer]

    def wait(self) -> Any:
        return self.future.result().result


def overlap(rounds: int = 7, *, steps: int = 30, device_s: float = 0.010, **sizes: int) -> dict[str, Any]:
    """Milliseconds of a step beyond the device's own time, plain and overlapped, in interleaved rounds."""
    desk = full_desk(**sizes)
    runner = SleepingRunner(desk.runner, device_s)
    exposed: dict[str, list[float]] = {"plain": [], "overlapped": []}
    for _ in range(rounds):
        for name, rows in exposed.items():
            rows.append(_exposed_ms(desk.scheduler, runner, steps, is_overlapped=name == "overlapped"))
    runner.close()
    medians = {name: median(rows) for name, rows in exposed.items()}
    pairs = zip(exposed["plain"], exposed["overlapped"], strict=True)
    shares = [1 - overlapped / plain for plain, overlapped in pairs]
    facts = {"running": len(desk.scheduler.running), "device_ms": 1000 * device_s}
    return facts | {"exposed_ms": medians, "hidden_share": median(shares), "samples": exposed | {"hidden": shares}}


def _exposed_ms(scheduler: Scheduler, runner: SleepingRunner, steps: int, *, is_overlapped: bool) -> float:
    loop = Loop(scheduler, runner, is_overlapped=is_overlapped)
    for _ in range(2):
        loop.step()
    began, busy = time.perf_counter(), runner.busy_s
    for _ in range(steps):
        loop.step()
    exposed = time.perf_counter() - began - (runner.busy_s - busy)
    loop.settle()
    return 1000 * exposed / steps


def _plant(desk: Desk, tokens: int) -> array[int]:
    """A prompt of its own in the tree, with a state at its end."""
    ids, ledger = _ids(desk, tokens), desk.memory.ledger
    pages = ledger.take_pages(-(-tokens // desk.memory.page_size))
    depth = desk.tree.grid.floor(tokens)
    desk.tree.insert(b"bench", ids, depth, pages, state=ledger.take_slot(), kind="turn_end")
    ledger.release(pages, ())
    return ids


def _ids(desk: Desk, count: int) -> array[int]:
    return array("q", desk.draw.integers(0, VOCAB, count, dtype=np.int64).tobytes())


def _request(number: int, prompt: array[int]) -> Request:
    return Request(
        request_id=str(number),
        index=0,
        arrival=number,
        priority=0,
        params=SamplingParams(temperature=0.0),
        seed=0,
        tokens=prompt,
        namespace=b"bench",
        num_prompt=len(prompt),
        max_tokens=OUTPUT_TOKENS,
        stop_ids=frozenset(),
    )


BOOKS: dict[str, Callable[[], dict[str, Any]]] = {"planning": planning, "matching": matching, "overlap": overlap}
