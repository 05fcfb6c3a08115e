"""KDA decode, verify and fold on one GPU over tiles, warps and registers: is each right, and how long does it take?

    python3 -m scripts.gpu.lab_decode --seconds 60
    TRITON_INTERPRET=1 python -m scripts.gpu.lab_decode --dry    (tiny sizes on a CPU, no times)

Each variant is compiled and checked in a process of its own pool (which fills the compiler's cache), then timed here.
Winners go into `baltoro/kernels/kda/tiles.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from multiprocessing.pool import Pool

import torch
from torch import Tensor

from baltoro.bench.kernels import kda as bench
from baltoro.bench.kernels.replays import copy_bytes_per_second
from baltoro.kernels.kda import fused, fused_reference, tiles
from baltoro.kernels.kda.fused_reference import MixerWeights, Window
from baltoro.kernels.kda.tiles import Tile, VerifyTile

FIELDS = ("k", "v", "decay", "beta")
BOUND = {"decode": 1e-2, "verify": 1e-2, "fold": 1e-5}


@dataclass(frozen=True)
class Job:
    """One variant of one operation, to be checked and compiled at these numbers of heads."""

    name: str
    tile: Tile | VerifyTile
    heads: tuple[int, ...]


def jobs() -> Iterator[Job]:
    """The most promising of each operation first, in turns: time may be up before the last."""
    many = [
        Tile(32, 32, 4, 128, 264), Tile(64, 32, 4, 128, 264), Tile(32, 32, 4, 0, 264), Tile(32, 64, 8, 128, 264),
        Tile(128, 32, 4, 96, 264), Tile(32, 128, 16, 0, 132), Tile(32, 32, 4, 128), Tile(128, 32, 4, 0, 264),
        Tile(32, 32, 4, 128, 528), Tile(64, 32, 4, 96, 264), Tile(32, 32, 4, 128, 132), Tile(32, 32, 4, 128, 0),
        Tile(64, 64, 8, 128, 264), Tile(32, 16, 4, 96, 264), Tile(32, 128, 16), Tile(32, 128, 16, 0, 0),
        Tile(32, 128, 32, 0, 0), Tile(32, 64, 8, 128, 0),
    ]  # fmt: skip
    verifies = [
        VerifyTile(64, 4, 168), VerifyTile(64, 4, 168, False), VerifyTile(128, 4, 168), VerifyTile(128, 4, 168, False),
        VerifyTile(32, 4, 168), VerifyTile(64, 4, 0), VerifyTile(32, 4, 168, False), VerifyTile(128, 8, 128),
        VerifyTile(64, 8, 80),
    ]  # fmt: skip
    folds = [
        Tile(32, 64, 4, 128), Tile(32, 32, 4), Tile(32, 64, 4), Tile(64, 32, 2), Tile(64, 32, 4), Tile(128, 32, 4),
        Tile(32, 32, 2),
    ]  # fmt: skip
    groups: list[list[Job]] = [
        [Job("decode", tile, (12, 96)) for tile in many],
        [Job("verify", tile, (12,)) for tile in verifies],
        [Job("fold", tile, (12,)) for tile in folds],
    ]
    for turn in zip_longest(*groups):
        yield from (job for job in turn if job)


def use(job: Job) -> None:
    """Make `fused` launch this variant; a fold's chain is decoded with the decode tile of its part."""
    if isinstance(job.tile, VerifyTile):
        verify = job.tile
        tiles.verify = lambda size, programs: verify
        return
    tile = job.tile
    if job.name == "decode":
        tiles.decode = lambda size, programs: tile
    else:
        fused._is_direct = lambda *_: False  # type: ignore[assignment]
        tiles.fold = lambda size: tile
        tiles.decode = lambda size, programs: replace(
            tile, rows=min(32, size), warps=4 if size == 128 else 1, registers=0
        )


def gap(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def case(heads: int, size: int, window: int, device: str) -> tuple[list[Tensor], MixerWeights, Tensor, Tensor, Tensor]:
    """Inputs of `window` tokens of four requests (one in the sink), weights, history, state, slots: from one seed."""
    random = torch.Generator().manual_seed(7)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype).to(device)

    f32, width = torch.float32, 3 * heads * size
    inputs = [draw(4, window, *rest) for rest in ((width,), (heads, size), (heads,), (heads, size))]
    weights = MixerWeights(
        draw(width, 4, dtype=f32) * 0.5, draw(heads, dtype=f32) * 0.3, draw(heads, size, dtype=f32) - 2,
        draw(size, dtype=f32), 1e-5, -5.0, size**-0.5,
    )  # fmt: skip
    slots = torch.tensor([6, 0, 3, 8], device=device)
    return inputs, weights, draw(9, 3, width), draw(9, heads, size, size, dtype=f32), slots


def exact(weights: MixerWeights) -> MixerWeights:
    return replace(weights, **{n: getattr(weights, n).double() for n in ("conv", "A_log", "dt_bias", "norm")})


def check(job: Job, heads: int, size: int, device: str) -> tuple[float, str]:
    """Relative distance from the float64 composition, and a digest of the state (of decode) that must not differ."""
    window = 8
    inputs, weights, history, state, slots = case(heads, size, window, device)
    past, matrix, doubles = history.double(), state.double(), [x.double() for x in inputs]
    if job.name == "fold":
        return check_fold(inputs, weights, history, state, slots), ""
    digest, found = hashlib.sha256(), 0.0
    live = [0, 2, 3]
    if job.name == "verify":
        made = Window.empty(4, window, heads=heads, keys=size, values=size, dtype=torch.bfloat16, device=device)
        for kept in (made.k, made.v, made.decay, made.beta):
            kept.fill_(torch.nan)
        got = fused.verify(*inputs, weights, history, state, slots, made)
        wanted = Window.empty(4, window, heads=heads, keys=size, values=size, dtype=torch.float64, device=device)
        expected = fused_reference.verify(*doubles, exact(weights), past, matrix, slots, wanted)
        pairs = [(getattr(made, n)[live], getattr(wanted, n)[live]) for n in FIELDS]
        found = max(gap(a, b) for a, b in [(got[live], expected[live]), *pairs])
        return found, ""
    for t in range(3):
        token = [x[:, t] for x in inputs]
        got = fused.decode(*token, weights, history, state, slots)
        expected = fused_reference.decode(*(x[:, t] for x in doubles), exact(weights), past, matrix, slots)
        found = max(found, gap(got[live], expected[live]), gap(state[1:], matrix[1:]))
        if not torch.equal(history[1:].double(), past[1:]) or bool((got[1] != 0).any()):
            found = float("inf")
    digest.update(state[1:].cpu().numpy().tobytes())
    return found, digest.hexdigest()[:12]


def check_fold(inputs: list[Tensor], weights: MixerWeights, history: Tensor, state: Tensor, slots: Tensor) -> float:
    """0 if the fold equals the decode kernel in every bit after 0 .. G tokens."""
    heads, size = state.shape[1], state.shape[2]
    made = Window.empty(4, 8, heads=heads, keys=size, values=size, dtype=torch.bfloat16, device=state.device, layers=1)
    first, kept = (history.clone(), state.clone()), made.layer(0)
    kept.x.copy_(inputs[0])
    after = [first]
    for t in range(8):
        one = Window(*(torch.empty_like(getattr(kept, n)[:, :1]) for n in ("x", *FIELDS)))
        fused.decode(*(x[:, t] for x in inputs), weights, history, state, slots, record=one)
        for name in FIELDS:
            getattr(kept, name)[:, t : t + 1] = getattr(one, name)
        after.append((history.clone(), state.clone()))
    for count, (past, matrix) in enumerate(after):
        history, state = first[0].clone(), first[1].clone()
        accepted = torch.full((4,), count, dtype=torch.int32, device=state.device)
        fused.fold(made, [history], [state], slots, accepted)
        if not torch.equal(history, past) or not torch.equal(state, matrix):
            return gap(state, matrix) + 1
    return 0.0


def child_pool(workers: int) -> Pool:
    """A process a task, so that an illegal access ends only its own; forked from one that has imported the rest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "baltoro.bench.kernels.kda", "baltoro.kernels.kda.fused"])
    return context.Pool(workers, maxtasksperchild=1)


def attempt(task: tuple[Job, int, str]) -> tuple[Job, float | str, str]:
    """`work`, or why not."""
    torch.set_num_threads(1)
    try:
        return work(*task)
    except Exception as reason:  # noqa: BLE001 - a line, and on with the next
        return task[0], f"{type(reason).__name__} {str(reason)[:200]}", ""


def work(job: Job, size: int, device: str) -> tuple[Job, float, str]:
    """In a worker: compile and check at every number of heads."""
    use(job)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    worst, digest = 0.0, ""
    for heads in job.heads:
        error, mark = check(job, heads, size, device)
        worst, digest = max(worst, error), digest + mark
        warm(job, heads, size, device)
    return job, worst, digest


def warm(job: Job, heads: int, size: int, device: str) -> None:
    """Launch with the strides of the timed calls, for which the compiler may specialise."""
    if job.name == "fold":
        num, layers = bench.FOLD[1], 2
        made = Window.empty(
            num, 8, heads=heads, keys=size, values=size, dtype=torch.bfloat16, device=device, layers=layers
        )
        states = torch.empty(num + 1, layers, heads, size, size, device=device)
        histories = torch.empty(num + 1, layers, 3, 3 * heads * size, device=device, dtype=torch.bfloat16)
        views = [histories[:, i] for i in range(layers)], [states[:, i] for i in range(layers)]
        slots = torch.arange(1, num + 1, device=device)
        fused.fold(made, *views, slots, torch.zeros(num, dtype=torch.int32, device=device))
    elif job.name == "decode":
        inputs, weights, history, state, slots = case(heads, size, 1, device)
        fused.decode(*(x[:1, 0].contiguous() for x in inputs), weights, history, state, slots[:1])


def check_all(size: int, device: str, workers: int, deadline: float) -> list[Job]:
    """Run every job in the pool, print a line each, return those that are right."""
    good: list[Job] = []
    pool = child_pool(workers)
    found = pool.imap_unordered(attempt, [(job, size, device) for job in jobs()])
    try:
        for _ in jobs():
            job, error, digest = found.next(timeout=max(1.0, deadline - time.monotonic()))
            if isinstance(error, str):
                print(f"check {job.name} {job.tile}: FAILED {error}", flush=True)
                continue
            is_right = error < BOUND[job.name]
            print(f"check {job.name} {job.tile}: error {error:.1e} {digest} {'' if is_right else 'WRONG'}", flush=True)
            good += [job] if is_right else []
    except multiprocessing.TimeoutError:
        print(f"check: {len(list(jobs()))} variants, {len(good)} right when the time was up", flush=True)
    pool.terminate()
    order = list(jobs())
    return sorted(good, key=order.index)


def timings(good: list[Job], bandwidth: float) -> Iterator[tuple[str, Job, Callable[[], list[bench.Figure]]]]:
    """(operation, variant, measurement), the target rows first."""
    decodes = ((96, 256), (12, 1), (12, 32), (96, 32), (12, 256), (96, 1))
    for step in (decodes[:3], "verify", "fold", decodes[3:]):
        if isinstance(step, str):
            for job in (job for job in good if job.name == step):
                if step == "fold":
                    yield step, job, lambda: bench._fold(*bench.FOLD, "fold", bandwidth)
                for heads, num in bench.VERIFIES[::-1] if step == "verify" else ():
                    yield f"verify {num} x {heads}", job, lambda h=heads, n=num: bench._verify(h, n, "", bandwidth)
            continue
        for heads, num in step:
            for job in (job for job in good if job.name == "decode"):
                is_latency = heads * num <= tiles.SMALL
                if is_latency and job.tile.ahead > 0:  # type: ignore[union-attr]
                    continue
                yield f"decode {num} x {heads}", job, lambda h=heads, n=num: bench._decode(h, n, "", bandwidth)


def line(row: tuple[str, float, float, str]) -> str:
    return f"{row[0]:28} {row[1]:9.1f} us {row[2]:6.2f} x floor  {row[3]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--dry", action="store_true", help="tiny sizes under the interpreter, no times")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    if args.dry:
        for job in jobs():
            tile = replace(job.tile, rows=16) if isinstance(job.tile, VerifyTile) else replace(job.tile, part=8, rows=8)
            print(job.name, job.tile, work(replace(job, tile=tile, heads=(2,)), 16, "cpu")[1:], flush=True)
        return
    good = check_all(128, "cuda", min(14, os.cpu_count() or 1), deadline - 0.3 * args.seconds)
    bench.find_spec = lambda name: None  # no peers here
    torch.manual_seed(0)
    bandwidth = copy_bytes_per_second()
    print(f"copy {bandwidth / 1e12:.2f} TB/s; {deadline - time.monotonic():.0f} s left", flush=True)
    rows: list[tuple[str, float, float, str]] = []
    for operation, job, measure in timings(good, bandwidth):
        if time.monotonic() > deadline:
            print(f"time is up before {operation} {job.tile}", flush=True)
            break
        use(job)
        try:
            for figure in measure():
                name = f"{operation} {figure.note}" if job.name == "fold" else operation
                rows.append((name, figure.seconds * 1e6, figure.seconds / figure.floor_seconds, str(job.tile)))
                print(line(rows[-1]), flush=True)
        except Exception as reason:  # noqa: BLE001 - a line, and on with the next
            print(f"{operation} {job.tile}: FAILED {type(reason).__name__} {str(reason)[:200]}", flush=True)
    print("sorted:", flush=True)
    for name in dict.fromkeys(row[0] for row in rows):
        for row in sorted(row for row in rows if row[0] == name)[:4]:
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
