"""A prefill step of K3's rank slice on one GPU: what it takes, and what takes it.

    python -m scripts.gpu.lab_prefill_step [--seconds 40] [--json FILE]
    python -m scripts.gpu.lab_prefill_step --dry            at tiny sizes on the CPU

Floor: the multiplications of all projections and picked experts at this run's rate of bf16 products; attention, the
delta rule, norms and depth reads are not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from baltoro.bench.kernels.timeline import Slot, timeline
from baltoro.bench.kernels.timing import ceilings
from baltoro.bench.slice import LADDER, Slice, SliceShape, published_shape
from scripts.gpu.lab_slice import say, tiny_shape

CASES = ((1, 4096, 4096), (4, 1024, 1024), (1, 1024, 16384), (64, 32, 512))
"""(requests, new tokens of each, keys of each)."""
TOP = 24


def multiplications(one: Slice) -> float:
    """Of a token: every weight beside experts once, and the picked experts."""
    config, experts = one.shape.config, set(one.moe.experts.parameters())
    plain = sum(p.numel() for p in one.parameters() if p not in experts and p.dim() == 2)
    picked = config.num_active_experts * 3 * config.expert_width * config.expert_intermediate_size
    return float(plain + picked)


def by_name(found: list[Slot]) -> list[tuple[float, int, str]]:
    """(us in all, launches, name), the heaviest first."""
    sums: dict[str, tuple[float, int]] = {}
    for slot in found:
        time_us, count = sums.get(slot.name, (0.0, 0))
        sums[slot.name] = (time_us + slot.time_us, count + 1)
    return sorted(((us, count, name) for name, (us, count) in sums.items()), reverse=True)


def wall_us(one: Slice) -> float:
    """Median of eager steps."""
    found = []
    for _ in range(7):
        one.restore()
        torch.cuda.synchronize()
        began = time.perf_counter()
        one()
        torch.cuda.synchronize()
        found.append(1e6 * (time.perf_counter() - began))
    return statistics.median(found[2:])


def measured(requests: int, tokens: int, keys: int, flops_per_s: float) -> dict[str, Any]:
    one = Slice(published_shape(keys), requests, tokens=tokens, dtype=torch.bfloat16, device="cuda")
    one.prepare(LADDER[-1])
    rows = requests * tokens
    floor, us = 1e6 * 2.0 * rows * multiplications(one) / flops_per_s, wall_us(one)
    say(f"\n{requests} x {tokens} new of {keys} keys: {us:.0f} us, products alone {floor:.0f}, {us / floor:.2f} x")
    seen = timeline(one, 3, is_captured=False)
    busy = sum(slot.time_us for slot in seen)
    say(f"{len(seen)} kernels, {busy:.0f} us of them")
    table = by_name(seen)
    for time_us, count, name in table[:TOP]:
        say(f"  {time_us:9.1f} us {time_us / busy:6.1%} in {count:3d}  {name[:110]}")
    return {"rows": rows, "keys": keys, "us": us, "floor_us": floor, "kernels": [list(row) for row in table[:TOP]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.dry:
        shape = tiny_shape()
        for keys in (130, 200):
            one = Slice(
                SliceShape(shape.config, shape.experts, shape.shared, shape.bank, keys),
                2, tokens=130, dtype=torch.float32, device="cpu",
            )  # fmt: skip
            out = one().settled().prefix
            assert out is not None and bool(torch.isfinite(out).all())
            say(f"{tuple(out.shape)}, {multiplications(one):.0f} multiplications a token")
        return
    began, rows = time.perf_counter(), []
    flops_per_s = ceilings().flops_per_s
    with torch.no_grad():
        for case in CASES:
            if time.perf_counter() - began < args.seconds:
                rows.append(measured(*case, flops_per_s))
    if args.json:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
