"""Many attempts at once: budgets over all rounds, failures of ours excluded and never 0, pauses that lose no token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baltoro.errors import InvariantError
from baltoro.protocol.completion import TokenDelta
from baltoro.rl.inline import InlinePolicy
from baltoro.rl.parts import Parts, open_parts
from baltoro.rl.tasks import TaskStream, held_out, make_family
from baltoro.rl.types import Group
from tests.rl.runs import Brief, recipe


class Made:
    """Parts that are closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.opened = folder, list[Parts]()

    def __call__(self, family: Brief | None = None, **changes: object) -> Parts:
        self.opened.append(open_parts(recipe(self.folder, **changes), families=[family or Brief()]))
        self.opened[-1].sync.publish(3, self.opened[-1].trainer.adapter())
        return self.opened[-1]


@pytest.fixture
def make(tiny_folder: Path) -> Iterator[Made]:
    made = Made(tiny_folder)
    yield made
    for parts in made.opened:
        parts.close()


def collect(parts: Parts, version: int = 3) -> list[Group]:
    return parts.collector.collect(version, parts.fresh(), parts.config.rollout.group_size)


def test_every_token_has_id_logprob_and_version(make: Made) -> None:
    parts = make()
    groups = collect(parts)
    members = [t for group in groups for t in group.members]
    assert len(members) == 8 and all(t.status == "complete" and t.score is not None for t in members)
    assert all(set(t.versions) == {3} and 1 <= t.num_sampled <= 12 for t in members)
    for t in members:
        assert parts.trainer.score(t.prompt, t.tokens) == pytest.approx(list(t.logprobs), abs=1e-4)
    assert len({t.tokens for t in members}) > 4
    assert parts.collector.record.tokens == sum(t.num_sampled for t in members)


def test_the_same_seed_gives_the_same_tokens_whatever_runs_beside(make: Made) -> None:
    wide = collect(make())
    narrow = collect(make(engine={"options": {"max_running": 3, "memory_bytes": 1 << 23}}, throttle={"most": 2}))
    threads = collect(make(rollout={"judge_threads": 2}, is_deterministic=False))
    said = [
        [t.tokens for g in sorted(groups, key=lambda g: g.group) for t in g.members]
        for groups in (wide, narrow, threads)
    ]
    assert said[0] == said[1] == said[2]


def test_what_cannot_be_judged_is_excluded_and_costs_no_other(make: Made) -> None:
    family = Brief(failures=tuple(f"train {n}" for n in (1, 3, 5)))
    parts = make(family)
    groups = collect(parts)
    by_task = {parts.tasks[g.task].task.question: g for g in groups}
    for question, group in by_task.items():
        is_out = question in family.failures
        assert {t.status for t in group.members} == ({"failed"} if is_out else {"complete"})
        assert all((t.score is None) == is_out for t in group.members)
    assert parts.collector.record.retries == parts.collector.record.failed == 4
    assert parts.collector.record.reasons["infrastructure"] == 4


class Stumbling(InlinePolicy):
    """Ends some requests by itself: the first `num_falls` of them, in the middle."""

    num_falls = 3

    def poll(self, timeout_s: float) -> list[TokenDelta]:
        deltas = super().poll(timeout_s)
        for delta in deltas:
            if self.num_falls and delta.finish_reason is None and not delta.request_id.startswith("score"):
                self.num_falls -= 1
                self.engine.abort(delta.request_id)
        return deltas


def test_an_engine_error_goes_on_from_the_tokens_that_came(make: Made) -> None:
    parts = make()
    parts.policy.__class__ = Stumbling
    members = [t for group in collect(parts) for t in group.members]
    assert {t.status for t in members} == {"complete"} and parts.collector.record.retries == 3
    straight = [t for group in collect(make()) for t in group.members]
    assert sorted(t.tokens for t in members) == sorted(t.tokens for t in straight)
    assert max(t.num_sampled for t in members) <= 12


def test_partial_rounds_pause_and_go_on_with_versions_by_token(make: Made) -> None:
    parts = make(partial={"share": 0.5, "max_tokens": 40, "max_staleness": 6})
    seen: list[Group] = []
    for version in range(3, 9):
        if version > 3:
            parts.sync._must_change = False
            parts.policy._must_change = False  # type: ignore[attr-defined]
            parts.sync.publish(version, parts.trainer.adapter())
        seen += collect(parts, version)
        parts.forget()
    members = [t for group in seen for t in group.members]
    assert parts.collector.record.paused or parts.book.pending()
    assert any(len(t.sampled_versions) > 1 for t in members)
    assert all(t.num_sampled <= 40 and list(t.versions) == sorted(t.versions) for t in members)
    assert {t.task for t in parts.book.pending()} <= parts.tasks.keys()


class Silent(InlinePolicy):
    def poll(self, timeout_s: float) -> list[TokenDelta]:
        return []


def test_a_wait_without_news_names_who_is_missing(make: Made) -> None:
    parts = make(rollout={"stall_s": 0.05})
    parts.policy.__class__ = Silent
    with pytest.raises(InvariantError, match=r"no news for 0.05 s; missing are \['0.0.1'"):
        collect(parts)


def test_a_stream_goes_on_at_its_cursor_and_never_gives_a_held_out_task() -> None:
    config = recipe(Path("x")).tasks[0]
    families = [make_family(config), make_family(replace(config, options={"name": "products", "operations": "x"}))]

    def stream() -> TaskStream:
        return TaskStream(families, [1.0, 2.0], seed=5, efforts=("low", "max"))

    first = stream().take(30)
    later = stream()
    later.skip_to(20)
    assert later.take(10) == first[20:]
    assert {d.effort for d in first} == {"low", "max"} and len({d.family.name for d in first}) == 2
    kept = {d.task.id for d in held_out(families, 10)}
    assert len(kept) == 20 and not kept & {d.task.id for d in stream().take(300)}
