"""Checkpoints of a Run: version, settings, `Run.state()`, as files of training state.

Invariants: a resumed run continues bit-identically on a CPU with the same number of threads; a checkpoint of other
settings is refused, with the keys that differ, unless they cannot change a loss.
"""

from __future__ import annotations

from pathlib import Path

import torch

from baltoro.config import dump
from baltoro.errors import ConfigError
from baltoro.trainer.run import Run
from baltoro.trainer.state_file import check_settings, plain, write_state

VERSION = 1
FREE_KEYS = ("name", "checkpoint", "eval", "log", "threads", "device", "data")  # may differ on resume


def save_checkpoint(run: Run, out: Path, *, keep: int) -> Path:
    """Write the state of `run`, then remove all but the newest `keep`."""
    return write_state(out, run.step, {"version": VERSION, "config": plain(dump(run.config)), **run.state()}, keep=keep)


def load_checkpoint(run: Run, path: Path) -> None:
    """Put `run` where the checkpoint was written. Errors: ConfigError if it is of another version or other settings."""
    state = torch.load(path, map_location=run.config.device, weights_only=True)
    if state.get("version") != VERSION:
        raise ConfigError(f"{path} has version {state.get('version')}, this code reads {VERSION}")
    check_settings(path, state["config"], run.config, free=FREE_KEYS)
    run.load_state(state)
