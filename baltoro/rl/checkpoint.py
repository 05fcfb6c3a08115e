"""State of an RL run on disk: everything that decides the next token and the next loss, written whole or not at all.

In: adapter, optimizer, version, data cursor, the book with its pending trajectories, the canary, generators, tasks of
what is pending. Out: a file of training state (`trainer.state_file`).
Invariants: a run killed at any moment leaves the last checkpoint whole; on a CPU, with an inline engine and
is_deterministic, a resumed run has the tokens and losses of one that was never stopped; a checkpoint of other settings
is refused with the keys that differ, unless they cannot change a token.
What an engine held (KV, states) is not kept: pending trajectories begin with a prefill.
Source: spec/training.md B.2 (25), G.11.
"""

from __future__ import annotations

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
from baltoro.trainer.state_file import check_settings, plain, write_state

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


def save(out: Path, config: RLConfig, saved: Saved, *, keep: int) -> Path:
    """Write, then remove all but the newest `keep`."""
    state = {
        "format": VERSION,
        "config": plain(dump(config)),
        "step": saved.step,
        "version": saved.version,
        "cursor": saved.cursor,
        "group": saved.group,
        "trainer": saved.trainer,
        "pending": _as_tensor(msgspec.msgpack.encode(saved.pending)),
        "torch_rng": torch.get_rng_state(),
    }
    return write_state(out, saved.step, state, keep=keep)


def load(path: Path, config: RLConfig) -> Saved:
    """Read; torch's generator is put where it was. Errors: ConfigError for another format or other settings."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state.get("format") != VERSION:
        raise ConfigError(f"{path} has format {state.get('format')}, this code reads {VERSION}")
    check_settings(path, state["config"], config, free=FREE_KEYS)
    torch.set_rng_state(state["torch_rng"])
    return Saved(
        step=state["step"],
        version=state["version"],
        cursor=state["cursor"],
        group=state["group"],
        trainer=state["trainer"],
        pending=msgspec.msgpack.decode(bytes(state["pending"].numpy()), type=Pending),
    )


def _as_tensor(data: bytes) -> torch.Tensor:
    """uint8, a copy: bytes on their way into a file of tensors."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
