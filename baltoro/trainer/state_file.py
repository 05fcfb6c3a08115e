"""Files of training state, in one folder under a run's: written whole or not at all, read only with like settings.

In: plain values and tensors. Out: `checkpoints/step-N.pt`. A file is written beside its place, flushed to the device
and renamed; a run killed at any moment leaves the last one whole.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from baltoro.config import dump
from baltoro.errors import ConfigError


def write_state(out: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Write what is known after step `step`, then remove all but the newest `keep`."""
    folder = _folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    beside = path.with_suffix(".part")
    with beside.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    _sync_folder(folder)
    for old in _all(out)[:-keep]:
        old.unlink()
    return path


def latest_state(out: Path) -> Path | None:
    """The newest file of a run's folder."""
    found = _all(out)
    return found[-1] if found else None


def check_settings(path: Path, kept: Any, config: Any, *, free: Collection[str]) -> None:
    """Errors: ConfigError with the keys in which `config` differs from the settings `kept` in `path`, but for those of
    `free`, which may."""
    found = differing_keys(kept, plain(dump(config)), free=free)
    if found:
        raise ConfigError(f"{path} was written with other settings ({', '.join(found)}); use another --out")


def differing_keys(a: Any, b: Any, where: str = "", *, free: Collection[str]) -> list[str]:
    """Dotted keys of two dumped configs that differ, without those at the top that are in `free`."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = [key for key in {**a, **b} if where or key not in free]
        return [
            found
            for key in keys
            for found in differing_keys(a.get(key), b.get(key), f"{where}.{key}".strip("."), free=free)
        ]
    return [] if a == b else [where]


def plain(value: Any) -> Any:
    """Only what a file may hold: no Path, no tuple (torch.load reads tensors and plain values alone)."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _folder(out: Path) -> Path:
    return out / "checkpoints"


def _all(out: Path) -> list[Path]:
    return sorted(_folder(out).glob("step-*.pt"))


def _sync_folder(folder: Path) -> None:
    """The rename itself must be on the device before older files go."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
