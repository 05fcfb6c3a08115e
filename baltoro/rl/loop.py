"""The loop: roll out, reward, step, publish, check, write. From the start, or from the last checkpoint.

In: Parts, a folder. Out: the parts after the last step; in the folder what `log.py` and `checkpoint.py` write.
Invariants: the version that samples is the one that was published last; every step is checked before the next one
samples; a step that counted no token publishes nothing; what was dumped is exactly what was trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baltoro.errors import ConfigError
from baltoro.rl import log
from baltoro.rl.checkpoint import load, save
from baltoro.rl.colocate import training
from baltoro.rl.drift import check_drift, start_test
from baltoro.rl.effort import measure_b0
from baltoro.rl.evaluate import EvalRecord, evaluate
from baltoro.rl.memory import memory_line
from baltoro.rl.parts import Parts
from baltoro.rl.samples import StepSamples, make_samples
from baltoro.rl.types import Group
from baltoro.trainer.state_file import latest_state

Listener = Callable[[Mapping[str, Any]], None]


@dataclass(slots=True)
class Clock:
    """When a run is to end before its last step, evaluation included. Single writer: the loop.

    until  of time.monotonic; None: never. eval_s, step_s: what the last evaluation and step took
    """

    until: float | None = None
    eval_s: float = 0.0
    step_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether another step, and an evaluation after it, would come too late."""
        return self.until is not None and time.monotonic() + self.step_s + self.eval_s >= self.until


def run(
    parts: Parts,
    out: Path,
    *,
    resume: bool = False,
    listener: Listener = lambda line: None,
    until: float | None = None,
) -> None:
    """To the last step, or until `until` (of time.monotonic): then to an evaluation and a checkpoint, to go on from it
    later. Errors: ConfigError if `out` holds a run and `resume` is off; InvariantError from a check."""
    config, clock = parts.config, Clock(until)
    listener(start(parts, out, clock, resume=resume))
    is_over = parts.step >= config.steps
    while not is_over:
        began = time.monotonic()
        groups = parts.collector.collect(parts.version, parts.fresh(), config.rollout.group_size)
        samples = samples_of(parts, groups)
        dumped = log.tasks_of(groups, {name: one.task for name, one in parts.tasks.items()})
        if config.save.has_rollouts:
            b0 = {name: parts.b0[name] for name in dumped if name in parts.b0}
            log.write_dump(
                out,
                log.Dump(step=parts.step + 1, version=parts.version, groups=tuple(groups), tasks=dumped, b0=b0),
            )
        line = log.rollout_line(samples, parts.collector.record) | train(parts, samples)
        if parts.canary is None:
            parts.pin(groups)
        canary = parts.canary.look(parts.policy, parts.trainer) if parts.canary is not None else None
        clock.step_s = time.monotonic() - began
        is_over = parts.step >= config.steps or clock.is_over
        has_eval = parts.step % config.eval.every_steps == 0 or is_over
        if has_eval:
            line |= memory_line(parts.trainer, parts.policy)
        held_out = measure(parts, clock) if has_eval else None
        line |= log.check_line(None, canary, held_out)
        parts.forget()
        line = {"step": parts.step, "version": parts.version, **line, "step_s": round(clock.step_s, 4)}
        line |= {"eval_s": round(clock.eval_s, 4)} if has_eval else {}
        log.append(out, line)
        if parts.step % config.save.every_steps == 0 or is_over:
            save(out, config, parts.saved(), keep=config.save.keep)
        listener(line)


def start(parts: Parts, out: Path, clock: Clock, *, resume: bool) -> Mapping[str, Any]:
    """Before the next step: the checkpoint if there is one, the start-up test, an evaluation before the first step."""
    found = latest_state(out)
    if found is not None and not resume:
        raise ConfigError(f"{out} already holds a run; go on with --resume, or choose another --out")
    if found is not None:
        parts.restore(load(found, parts.config))
    log.open_log(out, parts.config, steps=parts.step if found is not None else -1)
    checks, line = parts.config.checks, dict[str, Any]()
    is_first = parts.step == 0
    if checks.has_start_test:
        ids = parts.talk.prompt(parts.held_out[0])
        line["start"] = start_test(
            parts.policy, parts.trainer, parts.sync, ids, version=parts.version, std=checks.perturbation,
            is_first=is_first,
        )  # fmt: skip
    else:
        parts.sync.publish(parts.version, parts.trainer.adapter(), is_first=is_first)
    if is_first and parts.config.has_effort_budget:
        parts.b0 = measure_b0(parts)
    if is_first:
        held_out = measure(parts, clock)
        log.append(out, {"step": 0, "version": parts.version, **log.check_line(None, None, held_out)})
        line["eval"] = held_out
    return {"step": parts.step, "version": parts.version, **line}


def samples_of(parts: Parts, groups: Sequence[Group]) -> StepSamples:
    """Rewards and advantages as the recipe says."""
    config = parts.config
    return make_samples(
        groups,
        config.advantages,
        config.shaping_at(parts.step),
        max_tokens=config.partial.max_tokens,
        version=parts.version,
        b0=parts.b0,
        is_carried=config.partial.resume == "carry",
        replays_routes=config.rollout.replays_routes,
        random_rewards=config.seed if config.reward == "random" else None,
    )


def train(parts: Parts, samples: StepSamples) -> dict[str, Any]:
    """One optimizer step and its publication, while the engine sleeps if it is to."""
    config = parts.config
    began = time.monotonic()
    with training(parts.policy, parts.trainer, sleeps=config.engine.sleeps) as times:
        record = parts.trainer.step(samples.samples)
        trained = time.monotonic()
        sync = None
        if record is not None:
            if record.drift.tokens:  # none: all of it was sampled by older versions, and the canary has to do
                check_drift(record.drift, config.checks.max_k3)
            if record.num_grads or config.optim.lr == 0.0 or record.probe:
                sync = parts.sync.publish(parts.version + 1, parts.trainer.adapter())
                parts.version += 1
        published = time.monotonic()
    parts.step += 1
    seconds = {
        "train_s": round(trained - began - times.sleep_s, 4),
        "publish_s": round(published - trained, 4),
        "sleep_s": round(times.sleep_s, 4),
        "wake_s": round(times.wake_s, 4),
    }
    return log.train_line(record, parts.trainer.norm) | seconds | log.check_line(sync, None, None)


def measure(parts: Parts, clock: Clock) -> EvalRecord:
    """The held-out set under the version that serves."""
    config, began = parts.config, time.monotonic()
    found = evaluate(
        parts.policy,
        parts.held_out,
        parts.talk,
        draws=config.eval.draws,
        max_tokens=config.partial.max_tokens,
        seed=config.seed,
        most=parts.policy.pressure().max_running,
        others=parts.collector.early,
    )
    clock.eval_s = time.monotonic() - began
    return found
