"""K3's rank slice on one GPU: the ladder, a timeline of its last rung, and products of few rows by shape.

    python -m scripts.gpu.lab_slice --seconds 60 [--batches 1,64] [--json FILE]
    python -m scripts.gpu.lab_slice --dry            the same on the CPU, at tiny sizes, nothing captured

A rung that throws is one line; the ladder goes on above it. Times: medians of graph replays, or of eager steps with
the host included. Share: bytes that must move over this run's copy bandwidth, over the time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from baltoro.bench.kernels.timeline import describe, heaviest, timeline
from baltoro.bench.kernels.timing import Ceilings, ceilings, graph_us, wall_or_graph_us
from baltoro.bench.slice import LADDER, Rung, Seen, Slice, SliceShape, climb, forced, published_shape
from baltoro.kernels.linear import fast

# (name, rows of the weight, width): the products of one decode step of the slice
PRODUCTS = (
    ("KDA in", 6288, 7168), ("KDA f_b", 1536, 128), ("KDA/MLA out", 7168, 1536), ("MLA in", 3648, 7168),
    ("MLA q_b", 2304, 1536), ("router, down, shared", 6016, 7168), ("latent up", 7168, 3584),
    ("shared down", 7168, 768),
)  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 4096)
THIN = 64  # rows up to which our own kernels are tried


def say(text: str) -> None:
    print(text, flush=True)


def tiny_shape() -> SliceShape:
    """Every part, small."""
    shape = published_shape(keys=130)
    config = shape.config.with_(
        hidden_size=64, kda_num_heads=2, kda_head_dim=16, num_heads=3, kv_lora_rank=32, q_lora_rank=24,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_experts=8, num_active_experts=3,
        expert_intermediate_size=32, latent_size=32,
    )  # fmt: skip
    return SliceShape(config, experts=20, shared=24, bank=3, keys=130)


def ladder(shape: SliceShape, batch: int, device: str, bytes_per_s: float, until: float) -> dict[str, Any]:
    """Rows of one batch size, from the bottom; a rung that throws is skipped."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    one = Slice(shape, batch, dtype=dtype, device=device)
    parts, rows = one.bytes_by_part(), []
    floor = 1e6 * sum(parts.values()) / bytes_per_s
    say(f"\nbatch {batch}: " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in parts.items()))
    say(f"floor {floor:.1f} us, {one.num_hit()} experts hit")
    first: Seen | None = None
    for rung in LADDER:
        if time.perf_counter() > until:
            say(f"{rung.name}: no time left")
            continue
        try:
            step, out = climb(one, rung, bytes_per_s, wall_or_graph_us, first)
        except Exception as error:  # noqa: BLE001 - a line a rung, whatever went wrong
            say(f"{rung.name}: FAILED {type(error).__name__}: {str(error)[:200]}")
            continue
        first = out if first is None else first
        row = {
            "name": step.name,
            "us": round(step.time_us, 1),
            "share": round(step.share, 4),
            "gap": step.error,
            "flipped": step.flipped,
        }
        rows.append(row | trace(one, rung) if device == "cuda" else row)
        say(f"{step.name:<72} {step.time_us:9.1f} us  {step.share:6.1%}  gap {step.error:.1e}, {step.flipped} flipped")
    if device == "cuda":
        try:
            say(describe(timeline(one)))
        except Exception as error:  # noqa: BLE001
            say(f"no timeline: {type(error).__name__}: {str(error)[:200]}")
    return {"batch": batch, "bytes": parts, "floor_us": floor, "rows": rows}


def trace(one: Slice, rung: Rung) -> dict[str, Any]:
    """What the step's time goes into, of the profiler: kernels, and what weighs most, which is what to mend next."""
    try:
        with forced(*rung.forced):
            seen = timeline(one, is_captured=rung.is_captured)
    except Exception as error:  # noqa: BLE001 - the time stands without it
        return {"trace": f"{type(error).__name__}: {str(error)[:200]}"}
    top = heaviest(seen)
    for name, launches, time_us in top:
        say(f"    {time_us:9.1f} us in {launches:4d}  {name[:90]}")
    return {"kernels": len(seen), "heaviest": [[name[:90], n, round(us, 1)] for name, n, us in top]}


def products(found: Ceilings, until: float) -> list[dict[str, Any]]:
    """cuBLAS beside our kernels, each weight in as many copies as do not fit the cache."""
    made = []
    for name, out, width in PRODUCTS:
        copies = max(2, min(24, (160 << 20) // (2 * out * width)))
        weights = [torch.randn(out, width, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
        for rows in ROWS:
            floor = found.floor_us(2 * out * width, 2.0 * rows * out * width)
            if time.perf_counter() > until:
                return made
            x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            y = x.new_empty(rows, out)
            ways: dict[str, Callable[[torch.Tensor], object]] = {"cuBLAS": partial(F.linear, x)}
            if rows == 1:
                ways["one row"] = lambda w, x=x, y=y: fast.few_rows(x, w, y, y, 0)
            if rows <= THIN:
                ways["thin"] = lambda w, x=x, y=y: fast.many_rows(x, w, y, y, 0)
            times: dict[str, float] = {}
            for way, launch in ways.items():
                try:
                    exact = F.linear(x.double(), weights[0].double())
                    got = launch(weights[0])
                    got = got if isinstance(got, torch.Tensor) else y
                    gap = float((got.double() - exact).norm() / exact.norm())
                    if not gap < 5e-3:
                        say(f"{name} {rows} rows, {way}: WRONG, {gap:.1e}")
                        continue
                    work = partial(lambda launch, weights: [launch(w) for w in weights], launch, weights)
                    times[way] = graph_us(work, samples=5, inner=3) / copies
                except Exception as error:  # noqa: BLE001
                    say(f"{name} {rows} rows, {way}: FAILED {type(error).__name__}: {str(error)[:150]}")
            shown = "".join(f"  {way} {us:6.1f} us ({us / floor:4.2f})" for way, us in times.items())
            say(f"{name:<22} [{out}, {width}] {rows:3d} rows{shown}")
            made.append({"name": name, "rows": rows, "floor_us": floor, **times})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    began, batches = time.perf_counter(), [int(text) for text in args.batches.split(",")]
    result: dict[str, Any] = {"keys": args.keys, "ladders": []}
    if args.dry:
        for batch in (1, 5):
            result["ladders"].append(ladder(tiny_shape(), batch, "cpu", 1e10, began + args.seconds))
    else:
        torch.set_grad_enabled(False)
        found = ceilings()
        say(f"copy {found.bytes_per_s / 1e12:.2f} TB/s, bf16 product {found.flops_per_s / 1e12:.0f} TFLOP/s")
        result |= {"copy_bytes_per_s": found.bytes_per_s, "device": torch.cuda.get_device_name()}
        for n, batch in enumerate(batches):
            until = began + args.seconds * (0.4 + 0.3 * n)
            result["ladders"].append(ladder(published_shape(args.keys), batch, "cuda", found.bytes_per_s, until))
        result["products"] = products(found, began + args.seconds)
    if args.json:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
