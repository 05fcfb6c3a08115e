"""Rows of the kernel table that miss, on one GPU: KDA decode and fold by asynchronous copies, the router's product.

    python3 -m scripts.gpu.lab_rows --seconds 60
    python -m scripts.gpu.lab_rows --dry        (the compilations for Hopper alone)

Each variant is compiled and checked in a process of its own, then timed here beside what is chosen now. What to set:
decode `tiles.COPIED_DECODE`, fold `tiles.COPIED_FOLD`, router `linear.fast.MANY`, verify `tiles.verify`; where
"dependent" wins decode of one request or verify, `tiles.IS_DEPENDENT`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baltoro.bench.kernels import kda as bench
from baltoro.bench.kernels.replays import copy_bytes_per_second, replay_seconds
from baltoro.kernels.kda import fused, tiles
from baltoro.kernels.kda.tiles import Copied, Tile, VerifyTile
from baltoro.kernels.linear import fast as linear
from baltoro.kernels.linear import reference, stream
from baltoro.kernels.linear.stream import StreamTiles
from scripts.gpu import lab_decode

EXPERTS, LATENT, HIDDEN, TOKENS = 896, 3584, 7168, 256


@dataclass(frozen=True)
class Job:
    """One variant of one operation; None: what is chosen now."""

    name: str
    choice: Any = None


def jobs() -> Iterator[Job]:
    """The present choices, then the most promising first."""
    for name in ("fold", "decode", "router", "verify"):
        yield Job(name)
    folds = [
        Copied(64, 4, 2, 2), Copied(32, 4, 2, 4, 128), Copied(64, 8, 2, 2), Copied(128, 8, 3, 1), Copied(32, 4, 3, 3),
        Copied(128, 16, 2, 1), Copied(32, 4, 2, 3), Copied(32, 4, 4, 2), Copied(32, 2, 2, 4),
    ]  # fmt: skip
    decodes = [
        Copied(32, 4, 4, 3, 168), Copied(128, 16, 3, 1), Copied(32, 4, 3, 3, 168), Copied(64, 8, 3, 2, 128),
        Copied(128, 8, 3, 1), Copied(64, 4, 3, 2), Copied(32, 8, 6, 1), Copied(32, 4, 3, 4, 128), Copied(64, 8, 6, 1),
        Copied(32, 4, 6, 2),
    ]  # fmt: skip
    # by the fold's bits these must be of parts of 32
    more = [Tile(32, 16, 2, 128, 0), Tile(32, 32, 2, 0, 0), Tile(32, 64, 4, 0, 0), Tile(32, 32, 4, 112, 0)]
    router = [
        "pass", "beside", StreamTiles(256, 128, 64, 4, 8), StreamTiles(128, 128, 64, 5, 8),
        StreamTiles(128, 256, 64, 4, 8), StreamTiles(256, 64, 64, 4, 8),
    ]  # fmt: skip
    verifies = [VerifyTile(128, 8, 128), VerifyTile(64, 8, 0), VerifyTile(32, 4, 0), VerifyTile(128, 4, 0)]
    yield from (Job(name, "dependent") for name in ("decode", "verify"))
    lists = {"fold": folds, "decode": decodes, "router": router}
    for place in range(max(len(choices) for choices in lists.values())):
        yield from (Job(name, choices[place]) for name, choices in lists.items() if place < len(choices))
    yield from (Job("decode", tile) for tile in more)
    yield from (Job("verify", tile) for tile in verifies)


def use(job: Job) -> None:
    """Make the product launch it, here."""
    tiles.COPIED_FOLD = tiles.COPIED_DECODE = None
    tiles.decode, tiles.verify = DECODE, VERIFY
    linear.MANY, tiles.IS_DEPENDENT = "copies", False
    choice = job.choice
    if isinstance(choice, Tile):
        tiles.decode = lambda size, programs: choice
    elif isinstance(choice, VerifyTile):
        tiles.verify = lambda size, programs: choice
    elif isinstance(choice, Copied) and job.name == "fold":
        tiles.COPIED_FOLD = choice
    elif isinstance(choice, Copied):
        tiles.COPIED_DECODE, tiles.MANY = choice, 1
    elif choice == "dependent":
        tiles.IS_DEPENDENT = True
    elif isinstance(choice, str):
        linear.MANY = choice  # type: ignore[assignment]


DECODE, VERIFY = tiles.decode, tiles.verify


def router(job: Job, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the rest."""
    if not isinstance(job.choice, StreamTiles):
        return linear.router_linear(x, weight, EXPERTS)
    logits = torch.empty(len(x), EXPERTS, dtype=torch.float32, device=x.device)
    rest = x.new_empty(len(x), len(weight) - EXPERTS)
    stream.product(x, weight, logits, rest, EXPERTS, tiles=job.choice)
    return logits, rest


def router_inputs(sets: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows and weights, of which several do not fit a cache."""
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    return [(draw(TOKENS, HIDDEN), draw(EXPERTS + LATENT, HIDDEN) * 0.02) for _ in range(sets)]


def check(job: Job) -> float:
    """Relative distance from what is exact; a fold's bits are the decode kernel's, whichever that is."""
    if job.name != "router":
        # lab_decode's own check, which compares folds with decode steps bit by bit
        tile = VerifyTile(64, 4) if job.name == "verify" else Tile(32, 32, 4)
        found = max(lab_decode.check(lab_decode.Job(job.name, tile, ()), h, 128, "cuda")[0] for h in (12, 96))
        if job.name == "fold" and job.choice is not None:
            found += big_fold()
        return found
    ((x, weight),) = router_inputs(1)
    found = 0.0
    for got, exact in zip(router(job, x, weight), reference.router_linear(x.double(), weight.double(), EXPERTS),
                          strict=True):  # fmt: skip
        found = max(found, lab_decode.gap(got, exact))
    return found


def big_fold() -> float:
    """0 if many tiles a program, of several layers and lengths, are in every bit what `triton_fold` makes."""
    num, layers, heads = 40, 3, 12
    torch.manual_seed(1)
    states, histories = torch.randn(num + 1, layers, heads, 128, 128, device="cuda"), torch.randn(
        num + 1, layers, 3, 3 * heads * 128, device="cuda"
    ).bfloat16()  # fmt: skip
    window = lab_decode.Window.empty(
        num, 8, heads=heads, keys=128, values=128, dtype=torch.bfloat16, device="cuda", layers=layers
    )
    for part in fused.window_parts(window):
        part.copy_(torch.rand(part.shape, device="cuda") * 0.2)
    slots = torch.randperm(num, device="cuda") + 1
    slots[7] = 0
    accepted, results = torch.arange(num, device="cuda", dtype=torch.int32) % 9, []
    chosen = tiles.COPIED_FOLD
    for tiles.COPIED_FOLD in (None, chosen):
        after = states.clone(), histories.clone()
        fused.fold(window, [after[1][:, i] for i in range(layers)], [after[0][:, i] for i in range(layers)],
                   slots, accepted)  # fmt: skip
        results.append(after)
    return float(not all(torch.equal(a, b) for a, b in zip(*results, strict=True)))


BOUND = {"fold": 1e-5, "decode": 1e-2, "verify": 1e-2, "router": 5e-3}


def noted(taken: list[str], work: Callable[..., None], *rest: Any) -> None:
    """Work, and that it was done."""
    taken.append("")
    work(*rest)


def attempt(job: Job) -> tuple[Job, float | str]:
    """In a process of its own: compile and check."""
    torch.set_num_threads(1)
    try:
        use(job)
        taken: list[str] = []
        for name in ("_copied_fold", "_copied_decode"):
            setattr(fused, name, partial(noted, taken, getattr(fused, name)))
        found: float | str = check(job)
        if isinstance(job.choice, Copied) and not taken:
            raise ValueError("the product did not take it")
        if job.name == "decode":
            used = bench._inputs(96, (4,)), *bench._slots(96, 4, 0)
            fused.decode(*used[0], bench._weights(96), *used[1:])
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a line, and on with the next
        found = f"{type(error).__name__} {str(error).strip()[-200:]}"
    return job, found


def timings(job: Job, bandwidth: float) -> Iterator[tuple[str, Callable[[], list[tuple[str, float, float]]]]]:
    """(name, measurement -> (row, us, us of the floor))."""

    def rows(make: Callable[..., list[bench.Figure]], *shape: int) -> list[tuple[str, float, float]]:
        name = job.name + " " + " x ".join(str(n) for n in reversed(shape))
        return [
            (name + (" " + f.note if job.name == "fold" else ""), 1e6 * f.seconds, 1e6 * f.floor_seconds)
            for f in make(*shape, "", bandwidth)
        ]

    if job.name == "fold":
        yield "fold", partial(rows, bench._fold, *bench.FOLD)
    elif job.name == "verify":
        yield "verify", partial(rows, bench._verify, 12, 32)
    elif job.name == "decode":
        for heads, num in ((96, 256), (12, 1), (12, 32)):
            yield "decode", partial(rows, bench._decode, heads, num)
    else:
        yield "router", lambda: router_rows(job, bandwidth)


def router_rows(job: Job, bandwidth: float) -> list[tuple[str, float, float]]:
    """Weights from memory (several sets) and, as the bench has it, one set again and again."""
    found = []
    for name, sets in (("router 256, weights from memory", 4), ("router 256, one set", 1)):
        inputs = router_inputs(sets)
        seconds = replay_seconds([partial(router, job, x, w) for x, w in inputs for _ in range(8 // sets)])
        floor = max(inputs[0][1].numel() * 2 / bandwidth, 2 * TOKENS * inputs[0][1].numel() / 786e12)
        found.append((name, 1e6 * seconds, 1e6 * floor))
    return found


def probes() -> Iterator[str]:
    """What a state that moves in place can reach at all: bytes/s of x *= c, beside those of a copy; bare products."""
    x = torch.randn(1 << 28, device="cuda")
    for name, work in (
        ("x *= c in place", partial(x.mul_, 1.0)),
        ("y = c x", partial(torch.mul, x, 1.0, out=x.clone())),
    ):
        yield f"probe {name}: {2 * x.numel() * 4 / replay_seconds([work], repeats=9) / 1e12:.2f} TB/s"
    del x
    inputs = router_inputs(4)
    for name, options in (("bf16", {}), ("fp32", {"out_dtype": torch.float32})):
        works = [partial(torch.mm, x, w.T, **options) for x, w in inputs]
        yield f"probe torch.mm to {name}, weights from memory: {1e6 * replay_seconds(works):.1f} us"


def check_all(workers: int, until: float) -> list[Job]:
    """A line each; those that are right, in their order."""
    good: list[Job] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "scripts.gpu.lab_decode"])
    pool, every = context.Pool(workers, maxtasksperchild=1), list(jobs())
    found = pool.imap_unordered(attempt, every)
    try:
        for _ in every:
            job, error = found.next(timeout=max(1.0, until - time.monotonic()))
            is_right = not isinstance(error, str) and error < BOUND[job.name]
            print(f"check {job.name} {job.choice}: {error} {'' if is_right else 'WRONG'}", flush=True)
            good += [job] if is_right else []
    except multiprocessing.TimeoutError:
        print(f"check: {len(every)} variants, {len(good)} right when the time was up", flush=True)
    pool.terminate()
    return sorted(good, key=every.index)


def dry() -> None:
    """Compile what is new for Hopper, print registers and shared memory."""
    from scripts.gpu import compile_rows

    for job in jobs():
        if isinstance(job.choice, Copied):
            print(job.name, job.choice, compile_rows.compiled(job.name, job.choice), flush=True)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.dry:
        dry()
        return
    begun = time.monotonic()
    good = check_all(min(14, os.cpu_count() or 1), begun + 0.6 * args.seconds)
    bench.find_spec = lambda name: None  # type: ignore[assignment, return-value] # no peers here
    torch.manual_seed(0)
    bandwidth = copy_bytes_per_second()
    print(f"copy {bandwidth / 1e12:.2f} TB/s; {time.monotonic() - begun:.0f} s gone", flush=True)
    try:
        for line in probes():
            print(line, flush=True)
    except Exception as error:  # noqa: BLE001
        print(f"probes: FAILED {type(error).__name__} {str(error)[:200]}", flush=True)
    table: list[tuple[str, float, float, str]] = []
    for job in good:
        use(job)
        for name, measure in timings(job, bandwidth):
            if time.monotonic() > begun + args.seconds:
                print(f"time is up before {name} {job.choice}", flush=True)
                break
            try:
                table += [(*row, str(job.choice or "in Triton, as without these")) for row in measure()]
            except Exception as error:  # noqa: BLE001
                print(f"{name} {job.choice}: FAILED {type(error).__name__} {str(error)[:200]}", flush=True)
    print("sorted:", flush=True)
    for row, us, floor, choice in sorted(table):
        print(f"{row:34} {us:8.1f} us {us / floor:6.2f} x floor  {choice}", flush=True)


if __name__ == "__main__":
    main()
