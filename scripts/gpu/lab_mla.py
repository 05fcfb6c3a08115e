"""Configurations of latent attention, router product, top-k and depth mix on one GPU: right first, then fast.

    PYTHONPATH=/tmp/site2:. python3 -m scripts.gpu.lab_mla --seconds 60
    TRITON_INTERPRET=1 python -m scripts.gpu.lab_mla --dry        (tiny sizes, no times; for a machine without a GPU)

Compiles in worker processes into Triton's cache, then checks each setting against FP64 with poisoned results and times
it by graph replay. A setting that is wrong or fails is a line, not an end. A table per case comes last.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from baltoro.bench.kernels.timing import Ceilings, ceilings, graph_us
from scripts.gpu.lab_mla_cases import Case, Problem

SETTINGS = "scripts.gpu.lab_mla_settings"
"""Where CASES are; another lab names its own."""
T = TypeVar("T")
AT_ONCE = 4
"""Settings of a case that one worker checks, one after the other."""


def main(argv: Sequence[str] | None = None, settings: str = SETTINGS) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(argv)
    end = time.monotonic() + args.seconds
    cases = cases_of(settings)
    numbers = [n for n, case in enumerate(cases) if args.only in case.name]
    found, failed = Ceilings(1e12, 1e12), {}
    if not args.dry:
        failed = warm(settings, numbers, end - args.seconds * 0.42)
        say(f"compiled after {args.seconds - end + time.monotonic():.0f} s")
        found = ceilings()
        say(f"copy {found.bytes_per_s / 1e12:.2f} TB/s, bf16 product {found.flops_per_s / 1e12:.0f} TFLOP/s")
    tables = []
    for n in numbers:
        wrong = {rank: said for (case, rank), said in failed.items() if case == n}
        tables.append(attempt(partial(measure, cases[n], wrong, found, end, is_dry=args.dry)) or [])
    for lines in tables:
        say("\n".join(lines))


def cases_of(settings: str) -> Sequence[Case]:
    found: Sequence[Case] = importlib.import_module(settings).CASES
    return found


def warm(settings: str, numbers: list[int], end: float) -> dict[tuple[int, int], str]:
    """Check every setting in worker processes, most promising ones of every case first; stop waiting at `end`.

    Returns what went wrong, by (case, rank): such a setting is not tried in this process. A worker takes a few settings
    of one case; an illegal access ends its CUDA context, so it stops there and another one takes the rest.
    """
    count = [len(case.settings) for case in cases_of(settings)]
    jobs = [
        (settings, n, list(range(count[n]))[first : first + AT_ONCE])
        for first in range(0, max(count), AT_ONCE)
        for n in numbers
        if first < count[n]
    ]
    left = {(n, rank) for _, n, ranks in jobs for rank in ranks}
    failed: dict[tuple[int, int], str] = {}
    workers = max(2, min(15, (os.cpu_count() or 4) - 1))
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        waiting = [pool.apply_async(check_some, job) for job in jobs]
        while waiting and time.monotonic() < end:
            done = [job for job in waiting if job.ready()]
            waiting = [job for job in waiting if job not in done]
            for job in done:
                number, said, rest = job.get()
                failed |= {(number, rank): text for rank, text in said.items() if text}
                left -= {(number, rank) for rank in said}
                waiting += [pool.apply_async(check_some, (settings, number, rest))] if rest else []
            time.sleep(0.05)
        pool.terminate()
    return failed | dict.fromkeys(left, "not compiled and checked in time")


def check_some(settings: str, number: int, ranks: list[int]) -> tuple[int, dict[int, str], list[int]]:
    """In a worker: a launch of each, checked; the binaries stay in the cache on disk.

    Returns the case, what is wrong with each setting ("" if nothing), and those that are left after an end of context.
    """
    torch.set_num_threads(1)
    case, said = cases_of(settings)[number], {}
    for place, rank in enumerate(ranks):
        try:
            torch.manual_seed(0)
            error = check(case.problem(False), case.settings[rank])
            torch.cuda.synchronize()
            said[rank] = "" if error < case.bound else f"error {error:.1e}"
        except Exception as reason:  # noqa: BLE001
            said[rank] = f"{type(reason).__name__}: {str(reason)[:160]}".replace("\n", " ")
            if "illegal" in str(reason) or "CUDA error" in str(reason):
                return number, said, ranks[place + 1 :]
    return number, said, []


def measure(case: Case, wrong: dict[int, str], found: Ceilings, end: float, *, is_dry: bool) -> list[str]:
    """The table of a case, fastest first, without the settings that went wrong before."""
    torch.manual_seed(0)
    problem = case.problem(is_dry)
    rows: list[tuple[float, str]] = []
    floor = found.floor_us(problem.num_bytes, problem.flops)
    for rank, setting in enumerate(case.settings):
        if rank in wrong:
            say(f"{case.name}: {setting} NOT TRIED, {wrong[rank]}")
            continue
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
        us = attempt(partial(timed, problem, setting, problem.turns))
        alone = us if problem.turns == 1 else attempt(partial(timed, problem, setting, 1))
        if us is not None and alone is not None:
            line = f"{us:9.2f} us {us / floor:7.2f} x floor  {alone:7.2f} alone in a graph  {error:.1e}  {setting}"
            rows.append((us, line))
            say(f"{case.name}: {line}")  # the tables come last, if there is time for them
    case.forget()
    if not is_dry:
        torch.cuda.empty_cache()
    return [f"--- {case.name}: floor {floor:.1f} us, {problem.turns} in a graph", *(line for _, line in sorted(rows))]


def check(problem: Problem, setting: object) -> float:
    """The error of a setting; fresh memory is full of NaN here, so that what is not written is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        return problem.error(problem.launch(setting, 0))
    finally:
        torch.use_deterministic_algorithms(False)


def timed(problem: Problem, setting: object, turns: int) -> float:
    """Of one launch among `turns` in a graph, as a step has them; inputs in turn, lest weights fit the cache."""

    def launch() -> None:
        for turn in range(turns):
            problem.launch(setting, turn)

    return graph_us(launch, samples=9, inner=max(2, 20 // turns)) / turns


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
