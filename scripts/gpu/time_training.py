"""Time optimizer steps of a recipe on its corpora, for some batch sizes and stages: tokens a second, memory, losses.

python scripts/gpu/time_training.py --data data/tiny --tokens 65536 131072 --seconds 60
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also without an installed baltoro

from baltoro.trainer.record import read_records
from baltoro.trainer.step import launch_step, train_step
from scripts.gpu.profile_step import make_run, wait

READ_EVERY = 20


def time_steps(recipe: str, data: str, tokens: int, stage: int, seconds: float, changes: list[str]) -> str:
    """Train for `seconds` after two steps of warming up; one line about it."""
    run = make_run(recipe, data, tokens, stage, changes)
    on_gpu = torch.device(run.config.device).type == "cuda"
    first = [train_step(run).loss for _ in range(2)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    wait(run)
    began, pending, records = time.perf_counter(), [], []
    while time.perf_counter() - began < seconds and run.step < run.config.steps:
        pending.append(launch_step(run))
        if len(pending) == READ_EVERY:
            records += read_records(pending)
            pending.clear()
    records += read_records(pending)
    took = time.perf_counter() - began
    done, peak = sum(record.tokens for record in records), torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return (
        f"stage {stage}, {tokens} tokens: {took / len(records) * 1e3:.0f} ms a step, {done / took:,.0f} tokens/s, "
        f"{peak:.1f} GiB at most, loss {first[0]:.3f} -> {records[-1].loss:.3f} in {len(records)} steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/tiny.toml")
    parser.add_argument("--data", default="data/tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=60.0, help="in all, shared by the cases")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    cases = [(tokens, stage) for stage in args.stages for tokens in args.tokens]
    for tokens, stage in cases:
        share = args.seconds / len(cases)
        print(time_steps(args.recipe, args.data, tokens, stage, share, args.changes), flush=True)


if __name__ == "__main__":
    main()
