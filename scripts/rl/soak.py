"""A hundred steps at rate 0, with an engine in a process of its own that sleeps in every step: what must not move.

    python -m scripts.rl.soak

KL and |dlogp| between engine and trainer, memory of both processes, bytes on /dev/shm, open files, and what sleep gives
back and wake takes. The mini model. Written to bench/results/rl-cpu.json, section soak.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from baltoro.config import load_config
from baltoro.envs.base import Family
from baltoro.observe import resident_bytes
from baltoro.rl.engine_process import EnginePolicy
from baltoro.rl.log import read_log
from baltoro.rl.loop import run
from baltoro.rl.parts import open_parts
from baltoro.rl.recipe import RLConfig
from scripts.rl.result import ROOT, record, rounded

OVERRIDES = (
    "optim.lr=0.0",
    "engine.sleeps=true",
    "engine.options.is_poisoned=true",  # every byte is written, so that what sleep gives back can be seen
    "threads=1",
    "rollout.groups=2",
    "rollout.group_size=2",
    "partial.max_tokens=16",
    "optim.micro_tokens=256",
    "eval.every_steps=1000",
    "eval.tasks=1",
    "eval.draws=1",
    "save.plot_every_steps=0",
)
SETTLED = 20  # steps after which allocators and caches have what they will have


@dataclass(slots=True)
class Watch:
    """Numbers of every step and cycle. Single writer: `soak`. awake, asleep: resident bytes of the engine."""

    trainer: list[int] = field(default_factory=list)
    awake: list[int] = field(default_factory=list)
    asleep: list[int] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def attach(self, policy: EnginePolicy) -> None:
        """Look at every cycle of sleep and wake from now on."""
        sleep = policy.sleep

        def watched() -> None:
            self.awake.append(resident_bytes(policy.process_id))
            sleep()
            self.asleep.append(resident_bytes(policy.process_id))
            self.given_back.append(int(policy.given_back["given_back_bytes"]))

        policy.sleep = watched  # type: ignore[method-assign]

    def look(self, policy: EnginePolicy) -> None:
        """After a step."""
        self.trainer.append(resident_bytes())
        self.shared.append(sum(path.stat().st_size for path in policy.folder.iterdir() if path.is_file()))
        self.files.append(sum(len(os.listdir(f"/proc/{one}/fd")) for one in ("self", policy.process_id)))


def growth(values: Sequence[int]) -> int:
    """Largest value of the last fifth over the largest of the fifth after it has settled, in bytes (or files)."""
    width = max(1, (len(values) - SETTLED) // 5)
    return max(values[-width:]) - max(values[SETTLED : SETTLED + width])


def soak(config: RLConfig, out: Path, families: Sequence[Family] | None = None) -> dict[str, Any]:
    """Run. Out: figures, and whether the engine's pool came back to the same bytes in every cycle."""
    parts, watch = open_parts(config, families=families), Watch()
    try:
        policy = parts.policy
        assert isinstance(policy, EnginePolicy)
        watch.attach(policy)

        def listener(line: Mapping[str, Any]) -> None:
            if line["step"]:
                watch.look(policy)

        run(parts, out, listener=listener)
    finally:
        parts.close()
    return figures(watch, [line for line in read_log(out) if line["step"]])


def figures(watch: Watch, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the soak says, in numbers."""
    k3 = [line["k3"] for line in lines]
    fifth = max(1, len(k3) // 5)
    return {
        "steps": len(lines),
        "k3_first": fmean(k3[:fifth]),
        "k3_last": fmean(k3[-fifth:]),
        "k3_max": max(k3),
        "max_dlogp": max(line["max_dlogp"] for line in lines),
        "adapter_norm": max(line["adapter_norm"] for line in lines),
        "versions": lines[-1]["version"] - lines[0]["version"] + 1,
        "tensors_changed_after_the_first": sum(line["sync"]["num_changed"] for line in lines),
        "trainer_bytes": watch.trainer[SETTLED],
        "trainer_growth": growth(watch.trainer),
        "engine_awake_bytes": watch.awake[SETTLED],
        "engine_awake_growth": growth(watch.awake),
        "engine_asleep_bytes": watch.asleep[SETTLED],
        "engine_asleep_growth": growth(watch.asleep),
        "pool_given_back": sorted(set(watch.given_back)),
        "shared_bytes": sorted(set(watch.shared)),
        "open_files": sorted(set(watch.files[SETTLED:])),
    }


def main() -> None:
    """The mini model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    overrides = [*OVERRIDES, f"steps={options.steps}"]
    config = load_config(RLConfig, ROOT / "recipes" / "rl-mini.toml", overrides)
    with tempfile.TemporaryDirectory() as folder:
        found = rounded(soak(config, Path(folder) / "run"))
    print(found)
    record("soak", {"model": "mini", "recipe": "rl-mini", "overrides": overrides} | found)


if __name__ == "__main__":
    main()
