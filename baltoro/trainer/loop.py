"""A whole run: steps, evaluations, checkpoints, log lines; from the start or from the last checkpoint.

In: a TrainConfig and a folder. Out: the run after its last step; in the folder `metrics.jsonl` (one line a step),
`config.json` (what was resolved), `checkpoints/`.
Invariants: after a resume the log reads as if nothing had happened: lines past the checkpoint are dropped and written
again, with the same numbers. Time and speed are in the lines but not part of that promise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from baltoro.config import dump
from baltoro.errors import ConfigError
from baltoro.trainer.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from baltoro.trainer.config import TrainConfig
from baltoro.trainer.evaluate import evaluate
from baltoro.trainer.run import Run
from baltoro.trainer.step import StepRecord, train_step

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a listener is told after each step. `held_out` is None where no evaluation was due."""

    record: StepRecord
    held_out: dict[str, float] | None
    step_s: float


Listener = Callable[[Progress], None]


def train(config: TrainConfig, out: Path, *, resume: bool = False, listener: Listener | None = None) -> Run:
    """Train to the last step. Errors: ConfigError if `out` holds a run and `resume` is off."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    run = start(config, out, resume=resume)
    saved_at = time.monotonic()
    with (out / METRICS).open("a") as log:
        while run.step < config.steps:
            began = time.monotonic()
            record = train_step(run)
            step_s = time.monotonic() - began
            is_last = run.step == config.steps
            held_out = evaluate(run) if is_last or run.step % config.eval.every_steps == 0 else None
            progress = Progress(record, held_out, step_s)
            log.write(json.dumps(_line(progress, run.tokens)) + "\n")
            log.flush()
            if is_last or time.monotonic() - saved_at >= config.checkpoint.every_s:
                save_checkpoint(run, out, keep=config.checkpoint.keep)
                saved_at = time.monotonic()
            if listener is not None:
                listener(progress)
    return run


def start(config: TrainConfig, out: Path, *, resume: bool) -> Run:
    """The run before its next step; writes `config.json` and cuts the log back to the checkpoint."""
    found = latest_checkpoint(out)
    if found is not None and not resume:
        raise ConfigError(f"{out} already holds a run; go on with --resume, or choose another --out")
    run = Run.create(config)
    out.mkdir(parents=True, exist_ok=True)
    if found is not None:
        load_checkpoint(run, found)
    (out / "config.json").write_text(json.dumps(dump(config), indent=1, default=str) + "\n")
    lines = (out / METRICS).read_text().splitlines(keepends=True) if (out / METRICS).is_file() else []
    (out / METRICS).write_text("".join(lines[: run.step]))
    return run


def _line(progress: Progress, tokens: int) -> dict[str, object]:
    record = asdict(progress.record)
    line = record | {"total_tokens": tokens, "step_s": round(progress.step_s, 4)}
    return line if progress.held_out is None else line | {"held_out": progress.held_out}
