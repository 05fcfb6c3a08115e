"""Configurations of latent attention, router product, top-k and depth mix on one GPU: right first, then fast.

    PYTHONPATH=/tmp/site2:. python3 -m scripts.gpu.lab_mla --seconds 60
    TRITON_INTERPRET=1 python -m scripts.gpu.lab_mla --dry        (tiny sizes, no times; for a machine without a GPU)

Compiles in worker processes into Triton's cache, then checks each setting against FP64 with poisoned results and times
it by graph replay. A setting that is wrong or fails is a line, not an end. A table per case comes last.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from baltoro.bench.kernels.timing import Ceilings, ceilings, graph_us
from scripts.gpu.lab_mla_cases import CASES, Case, Problem

T = TypeVar("T")
WORKERS = 12


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(argv)
    end = time.monotonic() + args.seconds
    numbers = [n for n, case in enumerate(CASES) if args.only in case.name]
    found = Ceilings(1e12, 1e12)
    if not args.dry:
        warm(numbers, end - args.seconds / 2)
        say(f"compiled after {args.seconds - end + time.monotonic():.0f} s")
        found = ceilings()
        say(f"copy {found.bytes_per_s / 1e12:.2f} TB/s, bf16 product {found.flops_per_s / 1e12:.0f} TFLOP/s")
    tables = [table for n in numbers if (table := attempt(partial(measure, CASES[n], found, end, is_dry=args.dry)))]
    for lines in tables:
        say("\n".join(lines))


def warm(numbers: list[int], end: float) -> None:
    """Run every setting once, in worker processes, most promising ones of every case first; stop waiting at `end`."""
    jobs = sorted((rank, n) for n in numbers if CASES[n].is_warmed for rank in range(len(CASES[n].settings)))
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        waiting = [pool.apply_async(compile_one, (n, rank)) for rank, n in jobs]
        for job in waiting:
            try:
                job.get(max(0.1, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                say("compilation goes on while timing")
                break
        pool.terminate()


def compile_one(number: int, rank: int) -> None:
    """In a worker: one launch, which leaves the binary in the cache on disk. Errors are reported later, in order."""
    torch.manual_seed(0)
    try:
        problem = CASES[number].build(False)
        problem.launch(CASES[number].settings[rank], 0)
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001
        return


def measure(case: Case, found: Ceilings, end: float, *, is_dry: bool) -> list[str]:
    """The table of a case, fastest first."""
    torch.manual_seed(0)
    problem = case.build(is_dry)
    rows: list[tuple[float, str]] = []
    floor = found.floor_us(problem.num_bytes, problem.flops)
    for setting in case.settings:
        if time.monotonic() > end:
            say(f"{case.name}: out of time before {setting}")
            break
        error = attempt(partial(check, problem, setting))
        if error is None or not error < case.bound:
            say(f"{case.name}: {setting} WRONG, {error}")
            continue
        if is_dry:
            say(f"{case.name}: {setting} error {error:.1e}")
            continue
        us = attempt(partial(timed, problem, setting))
        if us is not None:
            rows.append((us, f"{us:9.1f} us {us / floor:7.2f} x floor  {error:.1e}  {setting}"))
            say(f"{case.name}: {rows[-1][1]}")  # the tables come last, if there is time for them
    if not is_dry:
        torch.cuda.empty_cache()
    return [f"--- {case.name}: floor {floor:.1f} us", *(line for _, line in sorted(rows))]


def check(problem: Problem, setting: object) -> float:
    """The error of a setting; fresh memory is full of NaN here, so that what is not written is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        return problem.error(problem.launch(setting, 0))
    finally:
        torch.use_deterministic_algorithms(False)


def timed(problem: Problem, setting: object) -> float:
    """Of one launch; as many sets of inputs one after the other as do not fit the cache."""

    def launch() -> None:
        for turn in range(problem.turns):
            problem.launch(setting, turn)

    return graph_us(launch, samples=11) / problem.turns


def attempt(work: Callable[[], T]) -> T | None:
    """The result, or None with a line that says what went wrong."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        say(f"FAILED: {type(error).__name__}: {str(error)[-300:]}")
        return None


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
