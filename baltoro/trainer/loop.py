"""A whole run: steps, evaluations, checkpoints, log lines; from the start or from the last checkpoint.

In: a TrainConfig and a folder. Out: the run after its last step; in the folder `metrics.jsonl` (one line a step),
`config.json` (what was resolved), `checkpoints/`.
Invariants: after a resume the log reads as if nothing had happened: lines past the checkpoint are dropped and written
again, with the same numbers. Time and speed are in the lines but not part of that promise.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch

from baltoro.config import dump
from baltoro.errors import ConfigError
from baltoro.trainer.checkpoint import load_checkpoint, save_checkpoint
from baltoro.trainer.compact import has_compact, read_compact, read_log, write_compact, write_log
from baltoro.trainer.config import TrainConfig
from baltoro.trainer.evaluate import evaluate
from baltoro.trainer.record import Pending, StepRecord, read_records
from baltoro.trainer.run import Run
from baltoro.trainer.state_file import latest_state
from baltoro.trainer.step import launch_step

METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a listener is told after each step. `held_out` is None where no evaluation was due."""

    record: StepRecord
    held_out: dict[str, float] | None
    step_s: float


Listener = Callable[[Progress], None]


def train(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    stop_after_s: float | None = None,
    compact: Path | None = None,
) -> Run:
    """Train to the last step, or until `stop_after_s` have passed: then to a checkpoint, to go on from it later. With
    0 only go to where the run stands.

    compact: folder for the compact form of every checkpoint; if `out` holds no run, go on from what lies there.
    Errors: ConfigError if `out` holds a run and `resume` is off.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    began = time.monotonic()
    run = start(config, out, resume=resume, compact=compact)
    saved_at = time.monotonic()
    with (out / METRICS).open("a") as log:
        watch = _Watch(run, log, listener)
        is_over = run.step >= config.steps or (stop_after_s is not None and stop_after_s <= 0)
        while not is_over:
            watch.saw(launch_step(run))
            now, is_last = time.monotonic(), run.step == config.steps
            is_over = is_last or (stop_after_s is not None and now - began >= stop_after_s)
            is_saving = is_over or now - saved_at >= config.checkpoint.every_s
            has_eval = is_last or run.step % config.eval.every_steps == 0
            if watch.is_full or is_saving or has_eval:
                watch.read(has_eval=has_eval)
            if is_saving:
                save_checkpoint(run, out, keep=config.checkpoint.keep)
                if compact is not None:
                    write_compact(run, compact)
                    write_log(out / METRICS, compact)
                saved_at = watch.began = time.monotonic()
    return run


class _Watch:
    """Reads the numbers of launched steps, some at a time, logs them and tells the listener.

    `began`: when the first of the steps now kept began; reading, evaluation and saving are no part of it.
    """

    def __init__(self, run: Run, log: TextIO, listener: Listener | None) -> None:
        self._run, self._log, self._listener = run, log, listener
        self._pending: list[Pending] = []
        self.began = time.monotonic()

    @property
    def is_full(self) -> bool:
        """Whether it is time to read."""
        return len(self._pending) >= self._run.config.log.every_steps

    def saw(self, step: Pending) -> None:
        """Keep a step."""
        self._pending.append(step)

    def read(self, *, has_eval: bool) -> None:
        """Wait for the steps that are kept; with `has_eval` evaluate after them."""
        records = read_records(self._pending)
        step_s = (time.monotonic() - self.began) / max(1, len(records))
        held_out = evaluate(self._run) if has_eval else None
        tokens = self._run.tokens - sum(record.tokens for record in records)
        for record in records:
            tokens += record.tokens
            progress = Progress(record, held_out if record is records[-1] else None, step_s)
            self._log.write(json.dumps(_line(progress, tokens)) + "\n")
            self._log.flush()
            if self._listener is not None:
                self._listener(progress)
        self._pending.clear()
        self.began = time.monotonic()


def start(config: TrainConfig, out: Path, *, resume: bool, compact: Path | None = None) -> Run:
    """The run before its next step; writes `config.json` and cuts the log back to the checkpoint."""
    found = latest_state(out)
    if found is not None and not resume:
        raise ConfigError(f"{out} already holds a run; go on with --resume, or choose another --out")
    run = Run.create(config)
    out.mkdir(parents=True, exist_ok=True)
    if found is not None:
        load_checkpoint(run, found)
    elif compact is not None and has_compact(compact):
        read_compact(run, compact)
        read_log(compact, out / METRICS)
    (out / "config.json").write_text(json.dumps(dump(config), indent=1, default=str) + "\n")
    lines = (out / METRICS).read_text().splitlines(keepends=True) if (out / METRICS).is_file() else []
    (out / METRICS).write_text("".join(line for line in lines if _step_of(line) <= run.step))
    return run


def _step_of(line: str) -> float:
    """The step of a line of the log; a line that was not written to its end is of no step."""
    return int(json.loads(line)["step"]) if line.endswith("\n") else math.inf


def _line(progress: Progress, tokens: int) -> dict[str, object]:
    record = asdict(progress.record)
    line = record | {"total_tokens": tokens, "step_s": round(progress.step_s, 4)}
    return line if progress.held_out is None else line | {"held_out": progress.held_out}
