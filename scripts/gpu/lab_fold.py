"""The fold of a draft window, and decode of latent attention over 128K keys, on one GPU: right first, then how fast.

    PYTHONPATH=/tmp/site2:. python3 -m scripts.gpu.lab_fold --seconds 60
    python -m scripts.gpu.lab_fold --dry                       (compiles for Hopper: registers, shared memory)
    TRITON_INTERPRET=1 python -m scripts.gpu.lab_fold --dry    (tiny sizes on a CPU: what the script does, no times)

Each variant is compiled and checked in a process of its own, then timed here beside what is chosen now. Winners: fold
`tiles.COPIED_FOLD` or `tiles.fold`; latent attention `split_decode.choose_tiles`, `MERGE_VALUES`, `MERGE_READS_ALL`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baltoro.bench.kernels import kda as bench
from baltoro.bench.kernels.replays import copy_bytes_per_second, replay_seconds
from baltoro.bench.kernels.timing import graph_us
from baltoro.kernels.kda import fused, tiles
from baltoro.kernels.kda.fused_reference import Window
from baltoro.kernels.kda.tiles import Copied, Direct, Tile
from baltoro.kernels.mla import reference, split_decode
from baltoro.kernels.mla.split_decode import Tiles
from scripts.gpu import lab_decode
from scripts.gpu.lab_mla_cases import Problem, attention, gap

FOLD = tiles.fold
WINDOW = 8
Seconds = Callable[[Sequence[Callable[[], object]]], float]


@dataclass(frozen=True)
class Latent:
    tiles: Tiles | None = None
    values: int = 8192
    reads_all: bool = False


@dataclass(frozen=True)
class Job:
    name: str
    choice: Any = None


def jobs() -> Iterator[Job]:
    """The most promising first, in turns."""
    folds = [
        None, Direct(64, 4), Direct(64, 4, 0, 2), Direct(32, 2), Direct(32, 2, 0, 2), Direct(32, 4, 0, 2),
        Tile(32, 64, 4, 128, 0), Direct(32, 4, 0, 4), Tile(32, 64, 4, 0), Direct(32, 4), Direct(128, 8),
        Direct(64, 8, 0, 2), Direct(64, 8), Direct(32, 2, 0, 4), Tile(32, 64, 4, 0, 0), Tile(32, 32, 4, 0, 0),
        Direct(16, 2), Tile(32, 32, 2, 0), Copied(32, 4, 2, 4, 128), Tile(32, 32, 4, 0), Direct(64, 4, 96),
    ]  # fmt: skip
    two, three, lean = (Tiles(16, 64, stages, 4, bulk=True, shareds=n) for stages, n in ((2, 0), (3, 2), (3, 1)))
    latents = [
        None, Latent(two, reads_all=True), Latent(lean, reads_all=True), Latent(three, reads_all=True), Latent(lean),
        Latent(two, 4096, True), Latent(three), Latent(lean, 4096, True), Latent(Tiles(16, 64, 2, 8, bulk=True)),
        Latent(Tiles(16, 64, 3, 8, bulk=True, shareds=1), reads_all=True),
    ]  # fmt: skip
    for place in range(max(len(folds), len(latents))):
        yield from (Job("fold", choice) for choice in folds[place : place + 1])
        yield from (Job("mla", choice or Latent()) for choice in latents[place : place + 1])


def use(choice: Any) -> None:
    """Make `fused.fold` launch it, here."""
    tiles.COPIED_FOLD = choice if isinstance(choice, Copied | Direct) else None
    tiles.fold = (lambda size: choice) if isinstance(choice, Tile) else FOLD


def fold_inputs(num: int, layers: int, heads: int, size: int, device: str) -> tuple[Window, Tensor, Tensor, Tensor]:
    """Records of 8 tokens, states [num + 1, layers, ...], histories likewise, slots."""
    states = torch.randn(num + 1, layers, heads, size, size, device=device)
    histories = torch.randn(num + 1, layers, 3, 3 * heads * size, device=device).bfloat16()
    made = Window.empty(
        num, WINDOW, heads=heads, keys=size, values=size, dtype=torch.bfloat16, device=device, layers=layers
    )
    for part in fused.window_parts(made):
        part.copy_(torch.rand(part.shape, device=device) * 0.2)
    made.decay.uniform_(0.5, 1.0)
    return made, states, histories, torch.randperm(num, device=device) + 1


def run_fold(made: Window, states: Tensor, histories: Tensor, slots: Tensor, accepted: Tensor) -> None:
    layers = range(states.shape[1])
    fused.fold(made, [histories[:, i] for i in layers], [states[:, i] for i in layers], slots, accepted)


def check_fold(choice: Any, device: str, heads: int, size: int) -> float:
    """0 if states and histories are those of repeated decode in every bit, for each number of accepted tokens, and
    those of the fold as it is, over several layers and lengths with NaN in all that was not accepted."""
    use(choice)
    found = lab_decode.check_fold(*lab_decode.case(heads, size, WINDOW, device))
    torch.manual_seed(1)
    num = 40 if device == "cuda" else 4
    made, states, histories, slots = fold_inputs(num, 3, heads, size, device)
    slots[num // 2] = 0
    accepted, results = torch.arange(num, device=device, dtype=torch.int32) % (WINDOW + 1), []
    for n, count in enumerate(accepted.tolist()):
        for part in fused.window_parts(made):
            part[:, n, count:] = torch.nan
    for one in (None, choice):
        use(one)
        results.append((states.clone(), histories.clone()))
        run_fold(made, *results[-1], slots, accepted)
    return found + float(not all(torch.equal(a, b) for a, b in zip(*results, strict=True)))


def check_latent(choice: Latent, device: str) -> float:
    """The widest gap from FP64 over ragged requests (NaN behind them and in what is not written), and at full length
    (which also compiles what is timed)."""
    found, heads, latent, width = 0.0, 12, 512, 576
    for window, splits in ((1, None), (1, 3), (2, 5), (1, 1)):
        lengths = torch.tensor([window, 64, 65, 1000, 4097], device=device)
        table = torch.randperm(399, device=device)[:330].view(5, 66) + 1
        kv = torch.randn(400, 64, 2, width, device=device).bfloat16()[:, :, 1]
        table[1:3] = table[0]  # requests may share pages
        q = torch.randn(5, window, heads, width, device=device).bfloat16()
        exact = reference.attend_absorbed(
            q.double(), kv.double().nan_to_num(), table, lengths, latent=latent, scale=0.07
        )
        kv[table[4, 64], 1:] = torch.nan if window == 1 else 0.0
        work = partial(split_decode.attend_absorbed, q, kv, table, lengths, splits=splits, latent=latent, scale=0.07)
        got = latent_call(choice, work)
        live = exact[1] > -torch.inf
        found = max(found, gap(got[0], exact[0]), gap(got[1][live], exact[1][live]))
        found += float(not torch.equal(got[1] > -torch.inf, live))
        if device == "cpu":
            return found
    problem = attention(1, 131072, heads, 1, False)
    return max(found, problem.error(latent_launch(choice, problem)))


def latent_call(choice: Latent, attend: Callable[..., Any]) -> Any:
    """With its constants of the merge and its tiles."""
    with mock.patch.multiple(split_decode, MERGE_VALUES=choice.values, MERGE_READS_ALL=choice.reads_all):
        return attend(tiles=choice.tiles)


def latent_launch(choice: Latent, problem: Problem) -> Any:
    """The problem's first call."""
    return latent_call(choice, lambda tiles: problem.launch((tiles, None, True), 0))


def attempt(job: Job, device: str = "cuda") -> tuple[Job, float | str]:
    """In a process of its own: compile and check."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        if job.name == "mla":
            return job, check_latent(job.choice, device)
        with mock.patch.object(fused, "_copied_fold", wraps=fused._copied_fold) as copied:
            found = check_fold(job.choice, device, *((12, 128) if device == "cuda" else (2, 8)))
        if device == "cuda":
            if copied.called != isinstance(job.choice, Copied | Direct):
                return job, "another kernel than this was launched"
            lab_decode.warm(lab_decode.Job("fold", Tile(32, 32, 4), ()), 12, 128, device)
            torch.cuda.synchronize()
        return job, found
    except Exception as error:  # noqa: BLE001 - a line, and on with the next
        return job, f"{type(error).__name__} {str(error).strip()[-200:]}"


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
            good += [job] if judged(job, error) else []
    except multiprocessing.TimeoutError:
        print(f"check: {len(every)} variants, {len(good)} right when the time was up", flush=True)
    pool.terminate()
    return sorted(good, key=every.index)


def judged(job: Job, error: float | str) -> bool:
    is_right = not isinstance(error, str) and error < (1e-9 if job.name == "fold" else 6e-3)
    print(f"check {job.name} {job.choice}: {error} {'' if is_right else 'WRONG'}", flush=True)
    return is_right


def rows(
    good: Sequence[Job], bandwidth: float, sizes: tuple[int, ...], device: str, seconds: Seconds
) -> Iterator[tuple[str, float, float, Job]]:
    """(operation, us, us of the floor, variant); each input in one piece of memory, which no cache holds."""
    is_dry = device == "cpu"
    layers, num, heads, size = sizes
    inputs = fold_inputs(num, layers, heads, size, device)
    mixed = torch.randint(0, WINDOW + 1, (num,), device=device, dtype=torch.int32)
    accepted = {str(n): torch.full_like(mixed, n) for n in (1, WINDOW)} | {"0 to 8": mixed}
    problems = {"1 x 131072": attention(1, 131072, 12, 1, is_dry), "32 x 8192": attention(32, 8192, 12, 1, is_dry)}
    for job in good:
        if job.name == "mla":
            for name, problem in problems.items():
                for note, times in (("", 4), (" alone in a graph", 1)):
                    us = timed(seconds, [partial(latent_launch, job.choice, problem)] * times)
                    yield f"mla {name}{note}", us, 1e6 * problem.num_bytes / bandwidth, job
            continue
        use(job.choice)
        for name, counts in accepted.items():
            us = timed(seconds, [partial(run_fold, *inputs, counts)])
            moved = (counts > 0).sum().item() * 2 * 4 * size * size
            moved += counts.sum().item() * (4 * size + 2 * size + 4 * size + 4)
            yield f"fold, {name} accepted", us, 1e6 * moved * layers * heads / bandwidth, job


def timed(seconds: Seconds, works: list[Callable[[], object]]) -> float:
    """Microseconds; infinity and a line where it fails."""
    try:
        return 1e6 * seconds(works)
    except Exception as error:  # noqa: BLE001
        print(f"FAILED {works[0]} {type(error).__name__} {str(error)[:300]}", flush=True)
        return float("inf")


def probes() -> Iterator[str]:
    """What reading alone reaches, and what a merge of 128 splits takes."""
    x = torch.randn(1 << 29, device="cuda")
    yield f"probe max of 2 GiB: {x.numel() * 4 / replay_seconds([x.max], repeats=7) / 1e12:.2f} TB/s"
    parts, sums = torch.randn(1, 128, 12, 512, device="cuda"), torch.randn(1, 128, 12, device="cuda")
    for values, reads_all in ((8192, False), (8192, True), (4096, True)):
        with mock.patch.multiple(split_decode, MERGE_VALUES=values, MERGE_READS_ALL=reads_all):
            us = graph_us(lambda: [split_decode._merge(parts, sums, False) for _ in range(10)]) / 10
        yield f"probe merge of 128 splits, {values} {reads_all}: {us:.2f} us"


def dry() -> None:
    """Compile for Hopper, or run everything small under the interpreter."""
    if not os.environ.get("TRITON_INTERPRET"):
        from scripts.gpu import compile_fold

        for job in jobs():
            one = job.choice
            given = (one.tiles, one.values, one.reads_all) if isinstance(one, Latent) else (one,)
            build = compile_fold.latent if isinstance(one, Latent) else compile_fold.fold
            print(job.name, one, build(*given), flush=True)
        return
    small = [Job("fold"), Job("fold", Tile(8, 8, 1)), Job("fold", Tile(8, 4, 1, 0, 0))]
    small += [Job("mla", Latent(None, 4096, True))]
    good = [job for job in small if judged(*attempt(job, "cpu"))]
    show(rows(good, 1e12, (2, 4, 2, 8), "cpu", lambda works: float(works[0]() is None)), time.monotonic() + 600)


def show(found: Iterator[tuple[str, float, float, Job]], until: float) -> None:
    """Lines as they come, and sorted at the end."""
    table: list[tuple[str, float, str]] = []
    for name, us, floor, job in found:
        choice = "as now" if job.choice in (None, Latent()) else str(job.choice)
        table.append((name, us, f"{name:32} {us:8.1f} us {us / floor:6.2f} x floor  {choice}"))
        print(table[-1][2], flush=True)
        if time.monotonic() > until:
            print(f"time is up after {name} {choice}", flush=True)
            break
    print("\n".join(["sorted:", *(line for _, _, line in sorted(table))]), flush=True)


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
    good = check_all(min(14, os.cpu_count() or 1), begun + 0.65 * args.seconds)
    torch.manual_seed(0)
    bandwidth = copy_bytes_per_second()
    print(f"copy {bandwidth / 1e12:.2f} TB/s; {time.monotonic() - begun:.0f} s gone", flush=True)
    found = rows(good, bandwidth, (*bench.FOLD[::-1], 128), "cuda", replay_seconds)
    show(found, begun + args.seconds)
    try:
        for line in probes():
            print(line, flush=True)
    except Exception as error:  # noqa: BLE001
        print(f"probes: FAILED {type(error).__name__} {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main()
