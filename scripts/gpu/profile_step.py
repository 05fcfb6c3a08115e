"""Where the time of one training step goes: GPU kernels by total time, host and GPU side by side, and the gaps.

    python scripts/gpu/profile_step.py --data data/tiny --tokens 65536

Prints: seconds of the first steps (tuning), a step's wall time, the host's time by part (launching, not waiting), the
places where the host waits, the GPU's busy time, the gaps between kernels, the kernels that take longest.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also without an installed baltoro

from baltoro.config import load_config
from baltoro.trainer import step as step_module
from baltoro.trainer.config import TrainConfig
from baltoro.trainer.prepare import Prepared
from baltoro.trainer.record import read_records
from baltoro.trainer.run import Run


def make_run(recipe: str, data: str, tokens: int, stage: int, changes: Sequence[str] = ()) -> Run:
    """A run of one stage of a recipe with so many tokens a step."""
    sizes = [f"batch.tokens={tokens}", f"batch.micro_tokens={tokens}", f'data.folder="{data}"', *changes]
    config = load_config(TrainConfig, recipe, sizes)
    picked = config.stages[stage]
    return Run.create(replace(config, stages=(replace(picked, until=1.0),)))


def wait(run: Run) -> None:
    """Until the device is idle."""
    if torch.device(run.config.device).type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def host_phases(run: Run) -> Iterator[dict[str, float]]:
    """Host seconds by phase of the steps within."""
    spent: dict[str, float] = defaultdict(float)

    def timed(function: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - began

        return call

    wanted = [
        (run.feed, "take", "waiting for data"), (Prepared, "to", "copies to the device"),
        (step_module, "objective", "forward"), (Tensor, "backward", "backward"), (run.muon, "step", "Muon"),
        (run.adam, "step", "AdamW"), (run.balancer, "update", "balance"), (run.qk_clip, "apply", "QK-clip"),
        (Run, "collect_gradients", "gradients to masters"), (Run, "publish", "masters to copies"),
        (step_module, "_clip_gradients", "gradient norm"),
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, name, label in wanted:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), label)))
        yield spent


def show_host(run: Run, steps: int) -> None:
    """Wall time of `steps` steps without a profiler, and what the host did in it."""
    wait(run)
    with host_phases(run) as spent:
        began = time.perf_counter()
        pending = [step_module.launch_step(run) for _ in range(steps)]
        launched = time.perf_counter() - began
        records = read_records(pending)
        wall = time.perf_counter() - began
    tokens = sum(record.tokens for record in records)
    print(f"\n{steps} steps: {wall / steps * 1e3:.1f} ms each, {tokens / wall:,.0f} tokens/s; the host was done after")
    print(f"{launched / steps * 1e3:.1f} ms each, of which ms a step:")
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"  {name:<22}{seconds / steps * 1e3:8.1f}")


def show_waits(run: Run) -> None:
    """Where a step makes the host wait for the device: it should be nowhere."""
    wait(run)
    if torch.device(run.config.device).type != "cuda":
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            pending = step_module.launch_step(run)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    read_records([pending])
    places = Counter(f"{one.filename}:{one.lineno}" for one in found if "synchroniz" in str(one.message))
    print(f"\nwaits in a step: {sum(places.values())}")
    for place, count in places.most_common():
        print(f"  {count:4d} {place}")


def show_device(run: Run, rows: int) -> None:
    """One step under the profiler."""
    wait(run)
    kinds = [ProfilerActivity.CPU]
    if torch.device(run.config.device).type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds) as found:
        read_records([step_module.launch_step(run)])
        wait(run)
    on_device = [e for e in found.events() if e.device_type != torch.autograd.DeviceType.CPU]
    if on_device:
        show_gaps([(e.time_range.start, e.time_range.end) for e in on_device])
    order = "self_device_time_total" if on_device else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=60))


def show_gaps(ranges: Sequence[tuple[float, float]]) -> None:
    """Busy and idle time of the device from (start, end) in microseconds."""
    busy, gaps, reached = 0.0, [], min(start for start, _ in ranges)
    first = reached
    for start, end in sorted(ranges):
        if start > reached:
            gaps.append(start - reached)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    print(f"\ndevice: {len(ranges)} kernels and copies in {(reached - first) / 1e3:.1f} ms, busy {busy / 1e3:.1f} ms")
    for low, high in ((0, 5), (5, 20), (20, 100), (100, 1000), (1000, float("inf"))):
        mine = [gap for gap in gaps if low <= gap < high]
        print(f"  gaps of {low} to {high} us: {len(mine)}, together {sum(mine) / 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/tiny.toml")
    parser.add_argument("--data", default="data/tiny")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    began = time.perf_counter()
    run = make_run(args.recipe, args.data, args.tokens, args.stage, args.changes)
    print(f"run made in {time.perf_counter() - began:.1f} s")
    for _ in range(3):
        began = time.perf_counter()
        record = step_module.train_step(run)
        print(f"step {record.step}: {time.perf_counter() - began:.2f} s, loss {record.loss:.3f}")
    show_host(run, 5)
    show_waits(run)
    show_device(run, args.rows)


if __name__ == "__main__":
    main()
