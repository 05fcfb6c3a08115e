"""A plain seeded driver: one life of an engine under random operations, everything compared after each.

Whatever comes, is aborted or loses its memory in between: every completion equals the one computed from its tokens
alone (`stub.expected`), prompt logprobs too, the books add up, and in the end the bytes of the tree are those of its
tokens. The same seed is the same life, but for what a thread of a disk tier or a late device does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from baltoro.cache.retention import RETENTION_NAMES
from baltoro.errors import BaltoroError, QueueFull
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from tests.engine.late import make_late
from tests.engine.stub import VOCAB, StubModel, expected, logits_after, make_engine, stub_config, submit, tokens_of
from tests.engine.truth import check_tree

MAX_CONTEXT = 48
PAGES_AND_ENDPOINTS = [(1, 4), (2, 4), (4, 4), (4, 8), (8, 4), (8, 8), (16, 4), (16, 16), (24, 12), (64, 8)]


def random_options(random: Random, folder: Path) -> dict[str, Any]:
    """An EngineConfig of small memory, so that something has to give way all the time."""
    page_size, endpoint = random.choice(PAGES_AND_ENDPOINTS)
    options: dict[str, Any] = {
        "page_size": page_size,
        "hash_endpoint": endpoint,
        "num_pages": max(-(-random.choice([64, 96, 160]) // page_size), -(-MAX_CONTEXT // page_size)),
        "num_slots": random.choice([1, 2, 3, 5, 8, 12]),
        "max_batch_tokens": random.choice([1, 5, 16, 64]),
        "max_running": random.randint(1, 6),
        "max_context": MAX_CONTEXT,
        "max_waiting": 6,
        "max_logit_rows": random.choice([2, 8, 256]),
        "pool": random.choice(["unified", "fixed"]),
        "overlap": random.random() < 0.5,
        "retract_every": random.choice([0, 0, 0, 3, 5]),
        "long_prompt_tokens": random.choice([0, 0, 12]),
        "long_share": random.choice([0.1, 0.5]),
    }
    tier = random.choice(["off", "device", "device", "host", "host", "disk", "disk"])
    if tier != "off":
        interval = endpoint * random.choice([1, 2])
        options |= {"prefix_cache": True, "track_interval": interval}
        options["retention"] = random.choice(RETENTION_NAMES)
    if tier in ("host", "disk"):
        options["host_cache_bytes"] = random.choice([5000, 20000, 200000] if tier == "host" else [3000, 8000])
        options["retract_to"] = random.choice(["host", "recompute"])
    if tier == "disk":
        options |= {"disk_cache_dir": str(folder), "disk_cache_bytes": random.choice([20000, 10**6])}
    return options


class Life:
    """One engine and what was asked of it."""

    def __init__(self, seed: int, folder: Path, **options: Any) -> None:
        self.random = random = Random(seed)
        self.options = random_options(random, folder) | options
        layers = random.choice([(2, 4)] * 8 + [(), (0, 1, 2, 3, 4)])
        self.model = StubModel(stub_config(mla_layers=layers), can_end=True)
        self.engine = make_engine(self.model, **self.options)
        if self.options["overlap"] and random.random() < 0.2:
            make_late(self.engine, seed, longest_s=0.0005)
        self.asked: dict[str, tuple[list[int], int, SamplingParams]] = {}
        self.told: dict[tuple[str, int], list[TokenDelta]] = {}
        self.seen: Counter[str] = Counter()
        self.past: list[list[int]] = []  # conversations that ended, to go on from

    def operate(self) -> None:
        """One random operation."""
        at = self.random.random()
        if at < 0.15:
            self._ask()
        elif at < 0.93:
            self._note(self.engine.step())
        elif at < 0.96:
            self._abort()
        elif at < 0.99:
            self._retract()
        else:
            self.engine.flush()
            self.seen["flush"] += 1
        self.seen["operations"] += 1
        self.engine.audit()

    def end(self) -> Counter[str]:
        """Let everything finish and give everything back. Out: how often what happened."""
        for _ in range(1500):
            if not self.engine.has_work:
                break
            self._note(self.engine.step())
            self.engine.audit()
        assert not self.asked, "everything that was asked has ended"
        if self.options.get("prefix_cache"):
            self.seen["states checked"] += len(check_tree(self.engine))
        numbers = self.engine.stats()
        for event in ("cache_hit_tokens", "host_loaded_tokens", "disk_read_total", "num_backups", "num_moves"):
            self.seen[event] += int(numbers.get(event, 0))  # type: ignore[call-overload]
        for event in ("num_retracted_reqs", "cache_superseded", "cache_evicted_states", "num_skipped_snapshots"):
            self.seen[event] += int(numbers.get(event, 0))  # type: ignore[call-overload]
        self.engine.flush()
        self.engine.audit()
        numbers = self.engine.stats()
        self.engine.close()
        assert numbers["pages_used"] == numbers["slots_used"] == 0
        return self.seen

    # ---- operations ------------------------------------------------------------------------------------------------
    def _ask(self) -> None:
        random, name = self.random, f"r{self.seen['asked']}"
        self.seen["asked"] += 1
        prompt = list(range(random.choice([0, 0, 9, 17])))
        if self.past and random.random() < 0.4:
            prompt = random.choice(self.past)[:30]
        prompt = prompt + [random.randrange(VOCAB - 1) for _ in range(random.randint(1, 13))]
        n, params = random.choice([1, 1, 1, 1, 2, 3]), self._params()
        try:
            submit(self.engine, name, prompt, n=n, priority=random.randint(0, 1), **params)
        except QueueFull:
            self.seen["queue full"] += 1
            return
        sampling = SamplingParams(**params)
        room = MAX_CONTEXT - len(prompt)
        if sampling.max_tokens > room:
            sampling = SamplingParams(**(params | {"max_tokens": room, "min_tokens": min(room, sampling.min_tokens)}))
        self.asked[name] = (prompt, n, sampling)
        self.seen["forks"] += n > 1

    def _params(self) -> dict[str, Any]:
        random = self.random
        params: dict[str, Any] = {
            "max_tokens": random.randint(1, 14),
            "temperature": random.choice([0.0, 0.9]),
            "seed": self.seen["asked"],
            "top_k": 20,
        }
        if random.random() < 0.15:
            params["prompt_logprobs"] = random.choice([0, 2])
        if random.random() < 0.1:
            params |= {"frequency_penalty": 0.7, "repetition_penalty": random.choice([1.0, 1.3])}
        if random.random() < 0.1:
            params["logit_bias"] = {random.randrange(VOCAB): 2.5}
        if random.random() < 0.1:
            params["min_tokens"] = random.randint(0, params["max_tokens"])
        return params

    def _abort(self) -> None:
        """At any moment: between steps, with or without one in flight, or between plan and commit."""
        if not self.asked:
            return
        engine, name = self.engine, self.random.choice(sorted(self.asked))
        plan = None
        if not engine.loop.is_in_flight and self.random.random() < 0.5:
            plan = engine.scheduler.plan()
        engine.abort(name)
        if plan is not None:
            engine.audit()
            engine.scheduler.commit(plan, engine.runner.run(plan))
        self._note(engine.scheduler.take_deltas())
        self.seen["abort in flight"] += plan is not None or engine.loop.is_in_flight

    def _retract(self) -> None:
        scheduler = self.engine.scheduler
        self.engine.loop.settle()
        if scheduler.running:
            scheduler.retraction.retract(self.random.choice(scheduler.running))

    # ---- answers ---------------------------------------------------------------------------------------------------
    def _note(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            self.told.setdefault(key, []).append(delta)
            if delta.finish_reason is not None:
                self._check(key, self.told.pop(key))

    def _check(self, key: tuple[str, int], deltas: list[TokenDelta]) -> None:
        prompt, n, params = self.asked[key[0]]
        wanted = expected(prompt, params, config=self.model.config, index=key[1], can_end=True)
        found, reason = tokens_of(deltas), deltas[-1].finish_reason
        if reason == "abort":
            assert found == wanted[: len(found)] and len(found) < len(wanted)
        else:
            assert found == wanted, (key, reason, deltas[-1].error)
            self.past = [*self.past[-5:], prompt + found]
        scores = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None)
        if found and params.prompt_logprobs is not None and not key[1]:
            assert scores is not None and scores[1:] == pytest.approx(self._scores(prompt), abs=1e-4)
            self.seen["scored"] += 1
        del self.asked[key[0]]
        if n > 1:
            self.asked[key[0]] = (prompt, n - 1, params)

    def _scores(self, prompt: list[int]) -> list[float]:
        logits = [logits_after(prompt[:n], self.model.config, can_end=True) for n in range(1, len(prompt))]
        return [float(torch.log_softmax(row, -1)[token]) for row, token in zip(logits, prompt[1:], strict=True)]


def live(seed: int, num_operations: int, folder: Path, **options: Any) -> Counter[str]:
    """One life. Out: how often what happened. A failure names seed and options."""
    life = Life(seed, folder, **options)
    try:
        for _ in range(num_operations):
            life.operate()
        return life.end()
    except (AssertionError, BaltoroError) as error:
        raise AssertionError(f"seed {seed}, options {life.options}: {error}") from error
