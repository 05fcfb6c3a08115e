"""What a run writes besides its checkpoints: JSON lines, dumps of rollouts, the resolved settings.

In: records of a step. Out: `metrics.jsonl`, one line a step; `rollouts/step-N.msgpack`; `config.json`.
Invariants: after a resume the log reads as if nothing had happened: lines past the checkpoint are dropped and written
again; a dump is whole or not there; figures that people know from elsewhere have their usual names.
Source: spec/training.md B.1 (metrics that users expect).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from baltoro.config import dump
from baltoro.envs.base import Task
from baltoro.errors import ConfigError
from baltoro.rl.drift import CanaryRecord
from baltoro.rl.evaluate import EvalRecord
from baltoro.rl.recipe import RLConfig
from baltoro.rl.round_record import RoundRecord
from baltoro.rl.samples import StepSamples
from baltoro.rl.sync import SyncRecord
from baltoro.rl.types import Group
from baltoro.trainer.policy_step import PolicyRecord

METRICS = "metrics.jsonl"
DUMP_FORMAT = 1


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of one step, as they were trained on at `version`, with their tasks, and b0 of those that have one."""

    format: int = DUMP_FORMAT
    step: int
    version: int
    groups: tuple[Group, ...]
    tasks: dict[str, Task]
    b0: dict[str, float] = {}


def write_dump(out: Path, found: Dump) -> Path:
    """Beside its place first, then renamed."""
    folder = out / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{found.step:08d}.msgpack"
    beside = path.with_suffix(".part")
    beside.write_bytes(msgspec.msgpack.encode(found))
    beside.replace(path)
    return path


def read_dumps(path: Path) -> Iterator[Dump]:
    """Of a file, a folder of them, or a run's folder, in the order of their steps. Errors: ConfigError."""
    inner = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = sorted(inner.glob("step-*.msgpack")) if inner.is_dir() else [inner]
    if not files or not files[0].is_file():
        raise ConfigError(f"{path} holds no dumped rollouts; a run writes them with save.has_rollouts")
    for file in files:
        try:
            found = msgspec.msgpack.decode(file.read_bytes(), type=Dump)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{file} is no dump of rollouts: {error}") from error
        if found.format != DUMP_FORMAT:
            raise ConfigError(f"{file} has format {found.format}, this code reads {DUMP_FORMAT}")
        yield found


def open_log(out: Path, config: RLConfig, *, steps: int) -> None:
    """The folder, the settings, and a log cut back to `steps` lines."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(dump(config), indent=1, default=str) + "\n")
    path = out / METRICS
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= steps))


def append(out: Path, line: Mapping[str, Any]) -> None:
    """Add a line to the run's metrics."""
    with (out / METRICS).open("a") as log:
        log.write(json.dumps(line) + "\n")


def read_log(out: Path) -> list[dict[str, Any]]:
    """Errors: ConfigError where there is none."""
    path = out / METRICS
    lines = path.read_text().splitlines() if path.is_file() else []
    if not lines:
        raise ConfigError(f"{path} has no lines")
    return [json.loads(line) for line in lines]


def rollout_line(samples: StepSamples, round_: RoundRecord | None) -> dict[str, Any]:
    """Figures of the rollouts."""
    lengths, stale = samples.lengths, samples.staleness
    line: dict[str, Any] = {
        "reward": samples.reward,
        "score": samples.score,
        "reasons": samples.reasons,
        "rules": samples.rules,
        "kinds": samples.kinds,
        "zero_std": samples.zero_std,
        "length_mean": fmean(lengths) if lengths else None,
        "length_max": max(lengths, default=None),
        "truncated": samples.truncated / len(lengths) if lengths else None,
        "stale": samples.num_stale,
        "staleness_mean": fmean(stale) if stale else None,
        "staleness_max": max(stale, default=None),
        "versions_max": max(samples.num_versions, default=None),
        "entropy": samples.entropy,
        "by_effort": {k: {"score": s, "length": t, "count": n} for k, (s, t, n) in samples.by_effort.items()},
    }
    if samples.routes_bytes:
        line["routes_bytes"] = samples.routes_bytes
        line["routes_bytes_per_token"] = round(samples.routes_bytes / sum(map(len, samples.samples)), 1)
    if round_ is not None:
        line |= {
            "rollout_s": round(round_.seconds, 4),
            "rollout_tokens": round_.tokens,
            "paused": round_.paused,
            "retries": round_.retries,
            "failed": round_.failed,
            "cap": round_.cap,
            "occupancy": round(round_.occupancy, 4),
            "retractions": round_.retractions,
        }
    return line


def train_line(record: PolicyRecord | None, norm: float) -> dict[str, Any]:
    """Figures of the optimizer step; a step that was skipped says so."""
    if record is None:
        return {"skipped": True, "adapter_norm": norm}
    found = record.drift
    routes = {f"routes_{key}": count for key, count in asdict(record.replayed).items()}
    return {
        "skipped": False,
        "loss": record.loss,
        "tokens": record.tokens,
        "fresh_tokens": found.tokens,
        "k3": found.k3 if found.tokens else None,
        "k1": found.k1 if found.tokens else None,
        "mean_dlogp": found.mean_abs if found.tokens else None,
        "max_dlogp": found.abs_max if found.tokens else None,
        "ratio_k3": record.ratio.k3,
        "ess": record.ratio.ess,
        "clip_low": record.clip_low,
        "clip_high": record.clip_high,
        "tis_cut": record.tis_cut,
        "grad_norm": record.grad_norm,
        "grads": [record.num_grads, record.num_factors],
        "probe": record.probe,
        "lr": record.lr,
        "adapter_norm": norm,
        **routes,
    }


def check_line(sync: SyncRecord | None, canary: CanaryRecord | None, held_out: EvalRecord | None) -> dict[str, Any]:
    """Figures of publication, canary and evaluation, where there are any."""
    line: dict[str, Any] = {}
    if sync is not None:
        line["sync"] = asdict(sync)
    if canary is not None:
        line["canary"] = asdict(canary) | {"ratio": canary.ratio}
    if held_out is not None:
        line["eval"] = asdict(held_out)
    return line


def tasks_of(groups: Sequence[Group], tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Tasks of some groups, by id."""
    return {group.task: tasks[group.task] for group in groups}
