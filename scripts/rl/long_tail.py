"""Decode rows occupied over rows available while rollouts are collected: partial rollout on, and off.

    python -m scripts.rl.long_tail

The mini model through the real scheduler, which is counted after each of its steps: a row is occupied in a step that
sampled a token for it. Efforts low, high and max make lengths that differ tenfold. Nothing is trained between rounds,
but a new version is published each time, so that what was paused begins with a prefill as it does in a run.
Written to bench/results/rl-cpu.json, section long_tail.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from statistics import fmean, quantiles
from typing import Any

from baltoro.config import load_config
from baltoro.protocol.completion import TokenDelta
from baltoro.rl.inline import InlinePolicy
from baltoro.rl.parts import Parts, open_parts
from baltoro.rl.recipe import RLConfig
from baltoro.rl.types import Group
from scripts.rl.result import ROOT, record, rounded

OVERRIDES = (
    "engine.place=inline",
    "engine.options.max_running=32",
    "rollout.efforts=['low', 'high', 'max']",
    "rollout.groups=12",
    "partial.max_tokens=256",
    "partial.max_staleness=8",
    "throttle.most=32",
    "optim.lr=0.0",
    "optim.micro_tokens=512",
    "threads=1",
)


@dataclass(slots=True)
class Rows:
    """Steps of an engine, and rows of them that sampled a token. Single writer: the policy it counts for."""

    steps: int = 0
    occupied: int = 0

    def share(self, available: int) -> float:
        return self.occupied / (self.steps * available) if self.steps else 0.0


def count_rows(policy: InlinePolicy) -> Rows:
    """From now on every poll that steps is counted."""
    rows, poll = Rows(), policy.poll

    def counted(timeout_s: float) -> list[TokenDelta]:
        is_step = policy.engine.has_work and not policy.is_asleep
        deltas = poll(timeout_s)
        rows.steps += is_step
        rows.occupied += sum(bool(delta.token_ids) for delta in deltas)
        return deltas

    policy.poll = counted  # type: ignore[method-assign]
    return rows


def measure(parts: Parts, rounds: int) -> dict[str, Any]:
    """Collect `rounds` rounds. Out: shares and lengths, of every round after the first (which nothing was left for)."""
    assert isinstance(parts.policy, InlinePolicy)
    available = parts.policy.engine.scheduler.max_running
    rows, found, groups = count_rows(parts.policy), list[dict[str, Any]](), list[Group]()
    began = time.monotonic()
    for version in range(parts.version, parts.version + rounds):
        parts.sync.publish(version, parts.trainer.adapter())
        before = replace(rows)
        groups += parts.collector.collect(version, parts.fresh(), parts.config.rollout.group_size)
        parts.forget()
        mine = Rows(rows.steps - before.steps, rows.occupied - before.occupied)
        line = {"share": mine.share(available), "reported": parts.collector.record.occupancy, "steps": mine.steps}
        found.append(line | {"paused": parts.collector.record.paused})
    later = found[1:]
    steps = sum(one["steps"] for one in later)
    lengths = sorted(t.num_sampled for group in groups for t in group.members)
    return {
        "occupied": sum(one["share"] * one["steps"] for one in later) / steps,
        "reported": fmean(one["reported"] for one in later),
        "tokens_per_step": sum(one["share"] * one["steps"] for one in later) * available / steps,
        "seconds": time.monotonic() - began,
        "groups": len(groups),
        "length_median": quantiles(lengths, n=2)[0],
        "length_p90": quantiles(lengths, n=10)[-1],
        "length_max": lengths[-1],
        "staleness_max": max(t.staleness(g_version) for g_version, t in _ends(groups)),
        "rounds": found,
    }


def _ends(groups: list[Group]) -> list[tuple[int, Any]]:
    """(version at its end, trajectory)."""
    return [(t.sampled_versions[-1], t) for group in groups for t in group.members if t.num_sampled]


def main() -> None:
    """Shares 1 (off), 0.75, 0.5, each on the same tasks with the same seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    arms = {}
    for share in (1.0, 0.75, 0.5):
        config = load_config(RLConfig, ROOT / "recipes" / "rl-mini.toml", [*OVERRIDES, f"partial.share={share}"])
        parts = open_parts(config)
        try:
            arms[f"share {share:g}"] = rounded(measure(parts, options.rounds))
        finally:
            parts.close()
        print(f"share {share:g}: {arms[f'share {share:g}']}")
    record("long_tail", {"rows": 32, "attempts_a_round": 96, "model": "mini", "arms": arms})


if __name__ == "__main__":
    main()
