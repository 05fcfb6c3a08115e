"""Carry mode with a real engine in a process: paused trajectories go on with the KV and state that they had, although
the engine gave its pool back in between, and nothing that they say between two rounds is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from baltoro.model.routes import bytes_per_token
from baltoro.rl.drift import distances, perturbed
from baltoro.rl.evaluate import evaluate
from baltoro.rl.parts import Parts, open_parts
from baltoro.rl.samples import make_samples
from baltoro.rl.types import Group, Trajectory
from tests.rl.runs import MODEL, Brief, recipe

pytestmark = pytest.mark.slow
OPTIONS: dict[str, Any] = {"max_running": 16, "memory_bytes": 1 << 23, "page_size": 16, "hash_endpoint": 64}
MOST = 60


@pytest.fixture(params=["carry", "reprefill"])
def parts(request: pytest.FixtureRequest, tiny_folder: Path) -> Iterator[Parts]:
    options = OPTIONS | ({"host_cache_bytes": 1 << 24, "retract_to": "host"} if request.param == "carry" else {})
    config = recipe(
        tiny_folder,
        is_deterministic=False,
        engine={"place": "process", "options": options},
        partial={"share": 0.3, "max_tokens": MOST, "resume": request.param},
        rollout={"replays_routes": True},
    )
    made = open_parts(config, families=[Brief()])
    yield made
    made.close()


def collect(parts: Parts) -> list[Trajectory]:
    groups = parts.collector.collect(parts.version, parts.fresh(), parts.config.rollout.group_size)
    return [t for group in groups for t in group.members]


def test_what_is_carried_goes_on_with_the_state_it_had(parts: Parts) -> None:
    """The versions are far apart, so a forward that computes everything by the new one agrees with what was sampled on
    after a prefill, and with nothing that was sampled on old KV and state."""
    parts.sync.publish(3, parts.trainer.adapter(), is_first=True)
    seen = collect(parts)
    paused = {t.key for t in parts.book.pending() if t.status == "paused" and t.tokens}
    assert paused and not parts.policy.pressure().active
    trial = perturbed(parts.trainer.adapter(), 0.3)
    parts.trainer.install(trial)
    parts.sync.publish(4, trial)
    parts.version = 4
    parts.policy.wake()
    evaluate(
        parts.policy, parts.held_out, parts.talk, draws=1, max_tokens=30, seed=1, most=16, others=parts.collector.early
    )
    is_carrying = parts.config.partial.resume == "carry"
    assert bool(parts.collector.early) == is_carrying
    both: list[Trajectory] = []
    for _ in range(8):  # which trajectories a round completes depends on when the engine's answers come
        seen += collect(parts)
        parts.policy.wake()
        both = [t for t in seen if t.key in paused and t.sampled_versions == (3, 4)]
        if both:
            break
    assert both
    assert all(t.num_sampled == MOST for t in seen if t.is_truncated)
    # with its end a request tells of all its tokens, those before the pause too
    assert {len(t.routes or b"") // bytes_per_token(MODEL) - len(t.prompt) - len(t.tokens) for t in both} == {-1}
    gaps = [gap for t in both for gap in late_gaps(parts, t)]
    if is_carrying:
        assert sum(gaps) / len(gaps) > 1e-2
    else:
        assert max(gaps) < 1e-4


def late_gaps(parts: Parts, t: Trajectory) -> list[float]:
    """|dlogp| of the tokens of version 4, by the trainer that has it."""
    found = distances(parts.trainer.score(t.prompt, t.tokens), t.logprobs)
    return [gap for gap, version in zip(found, t.versions, strict=True) if version == 4]


def test_hybrid_tokens_have_no_part_in_the_drift() -> None:
    config = recipe(Path("x"))
    t = Trajectory(task="t", group=0, index=0, prompt=(1,), score=1.0).say((2, 3), (0.0,) * 2, 3).say((4,), (0.0,), 4)
    fresh = Trajectory(task="t", group=0, index=1, prompt=(1,), score=0.0).say((5,), (0.0,), 4)
    members = tuple(replace(one, status="complete") for one in (t, fresh))
    group = Group(group=0, task="t", members=members)
    for is_carried, expected in ((False, (False, False, True)), (True, (False, False, False))):
        found = make_samples(
            [group], config.advantages, config.shaping, max_tokens=9, version=4, is_carried=is_carried
        ).samples
        assert found[0].is_fresh == expected and found[1].is_fresh == (True,)
