"""Time optimizer steps of a recipe's model on the corpora that are there, and show where the time goes."""

from __future__ import annotations

import argparse
import time

import torch

from baltoro.config import load_config
from baltoro.trainer.config import TrainConfig
from baltoro.trainer.run import Run
from baltoro.trainer.step import train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="recipes/tiny.toml")
    parser.add_argument("--data", default="data/mini")
    parser.add_argument("--mix", default="{ docs = 0.7, sums = 0.3 }")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536])
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    for tokens in args.tokens:
        stages = f"stages=[{{ until = 1.0, max_length = {args.length}, mix = {args.mix} }}]"
        sizes = [f"batch.tokens={tokens}", f"batch.micro_tokens={tokens}", stages, f"data.folder={args.data}"]
        config = load_config(TrainConfig, args.recipe, [*sizes, "optim.warmup=0.0"])
        run = Run.create(config)
        losses, times = [], []
        for _ in range(args.steps):
            torch.cuda.synchronize()
            began = time.perf_counter()
            losses.append(train_step(run).loss)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        last = sorted(times[2:])[len(times[2:]) // 2]
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{tokens} tokens: {last * 1e3:.0f} ms a step, {tokens / last:,.0f} tokens/s, {peak:.1f} GiB at most")
        print("  first steps", [f"{t:.2f}" for t in times], "losses", [f"{x:.3f}" for x in losses])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train_step(run)
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))


if __name__ == "__main__":
    main()
