"""Training state on disk: written whole or not at all.

In: a Run. Out: `checkpoints/step-N.pt` under the run's folder: version, settings, `Run.state()`.
A file is written beside its place, flushed to the device and renamed; a run killed at any moment leaves the last one.
Invariants: a resumed run continues bit-identically on a CPU with the same number of threads; a checkpoint of other
settings is refused, with the keys that differ, unless they cannot change a loss.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from baltoro.config import dump
from baltoro.errors import ConfigError
from baltoro.trainer.run import Run

VERSION = 1
FREE_KEYS = ("name", "checkpoint", "eval", "log", "threads", "device", "data")  # may differ on resume


def checkpoint_folder(out: Path) -> Path:
    """Where a run's checkpoints lie."""
    return out / "checkpoints"


def save_checkpoint(run: Run, out: Path, *, keep: int) -> Path:
    """Write the state of `run`, then remove all but the newest `keep`."""
    folder = checkpoint_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{run.step:08d}.pt"
    beside = path.with_suffix(".part")
    with beside.open("wb") as file:
        torch.save({"version": VERSION, "config": plain(dump(run.config)), **run.state()}, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    _sync_folder(folder)
    for old in _all_checkpoints(out)[:-keep]:
        old.unlink()
    return path


def latest_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint of a run's folder."""
    found = _all_checkpoints(out)
    return found[-1] if found else None


def load_checkpoint(run: Run, path: Path) -> None:
    """Put `run` where the checkpoint was written. Errors: ConfigError if it is of another version or other settings."""
    state = torch.load(path, map_location=run.config.device, weights_only=True)
    if state.get("version") != VERSION:
        raise ConfigError(f"{path} has version {state.get('version')}, this code reads {VERSION}")
    differing = differing_keys(state["config"], plain(dump(run.config)))
    if differing:
        raise ConfigError(f"{path} was written with other settings ({', '.join(differing)}); use another --out")
    run.load_state(state)


def _all_checkpoints(out: Path) -> list[Path]:
    return sorted(checkpoint_folder(out).glob("step-*.pt"))


def differing_keys(a: Any, b: Any, where: str = "") -> list[str]:
    """Dotted keys of two dumped configs that differ, without those that cannot change a loss."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [key for key in {**a, **b} if where or key not in FREE_KEYS]
        return [found for key in keys for found in differing_keys(a.get(key), b.get(key), f"{where}.{key}".strip("."))]
    return [] if a == b else [where]


def plain(value: Any) -> Any:
    """Only what a checkpoint may hold: no Path, no tuple (torch.load reads tensors and plain values alone)."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _sync_folder(folder: Path) -> None:
    """The rename itself must be on the device before older checkpoints go."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
