"""State of an RL run on disk: everything that decides the next token and the next loss, written whole or not at all.

In: adapter, optimizer, version, data cursor, the book with its pending trajectories, the canary, generators, tasks of
what is pending. Out: `checkpoints/step-N.pt`, beside its place first, flushed to the device, renamed.
Invariants: a run killed at any moment leaves the last checkpoint whole; on a CPU, with an inline engine and
is_deterministic, a resumed run has the tokens and losses of one that was never stopped; a checkpoint of other settings
is refused with the keys that differ, unless they cannot change a token.
What an engine held (KV, states) is not kept: pending trajectories begin with a prefill.
Source: spec/training.md B.2 (25), G.11.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from baltoro.config import dump
from baltoro.envs.base import Task
from baltoro.errors import ConfigError
from baltoro.rl.partial import BookState
from baltoro.rl.recipe import RLConfig
from baltoro.rl.throttle import Throttle
from baltoro.rl.types import Trajectory

VERSION = 1
FREE_KEYS = ("name", "model", "steps", "save", "eval", "threads", "engine", "checks")  # may differ on resume


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the air besides tensors."""

    book: BookState
    tasks: dict[str, Task]  # by id, of the pending trajectories
    canary: Trajectory | None
    b0: dict[str, float] = {}
    throttle: Throttle | None = None


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as it was read. `trainer`: of PolicyTrainer; `cursor`: tasks taken; `group`: the next number."""

    step: int
    version: int
    cursor: int
    group: int
    trainer: dict[str, Any]
    pending: Pending


def checkpoint_folder(out: Path) -> Path:
    """Where a run's checkpoints lie."""
    return out / "checkpoints"


def save(out: Path, config: RLConfig, saved: Saved, *, keep: int) -> Path:
    """Write, then remove all but the newest `keep`."""
    folder = checkpoint_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{saved.step:08d}.pt"
    beside = path.with_suffix(".part")
    state = {
        "format": VERSION,
        "config": plain(dump(config)),
        "step": saved.step,
        "version": saved.version,
        "cursor": saved.cursor,
        "group": saved.group,
        "trainer": saved.trainer,
        "pending": as_tensor(msgspec.msgpack.encode(saved.pending)),
        "torch_rng": torch.get_rng_state(),
    }
    with beside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(folder)
    for old in all_checkpoints(out)[:-keep]:
        old.unlink()
    return path


def latest(out: Path) -> Path | None:
    """The newest checkpoint of a run's folder."""
    found = all_checkpoints(out)
    return found[-1] if found else None


def load(path: Path, config: RLConfig) -> Saved:
    """Read; torch's generator is put where it was. Errors: ConfigError for another format or other settings."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state.get("format") != VERSION:
        raise ConfigError(f"{path} has format {state.get('format')}, this code reads {VERSION}")
    differing = differences(state["config"], plain(dump(config)))
    if differing:
        raise ConfigError(f"{path} was written with other settings ({', '.join(differing)}); use another --out")
    torch.set_rng_state(state["torch_rng"])
    return Saved(
        step=state["step"],
        version=state["version"],
        cursor=state["cursor"],
        group=state["group"],
        trainer=state["trainer"],
        pending=msgspec.msgpack.decode(bytes(state["pending"].numpy()), type=Pending),
    )


def all_checkpoints(out: Path) -> list[Path]:
    """Those of a run, oldest first."""
    return sorted(checkpoint_folder(out).glob("step-*.pt"))


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Dotted keys in which two dumps differ, those that may left out."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = [key for key in {**a, **b} if where or key not in FREE_KEYS]
        return [found for key in keys for found in differences(a.get(key), b.get(key), f"{where}.{key}".strip("."))]
    return [] if a == b else [where]


def plain(value: Any) -> Any:
    """Only what a checkpoint may hold: torch.load reads tensors and plain values alone."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def as_tensor(data: bytes) -> torch.Tensor:
    """uint8, a copy: bytes on their way into a file of tensors."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def sync_folder(folder: Path) -> None:
    """The rename itself must be on the device before older checkpoints go."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
