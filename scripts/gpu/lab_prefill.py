"""The KDA chunk form on a GPU: which compiled piece is wrong, then times of every kernel over its configurations.

    python -m scripts.gpu.lab_prefill --seconds 60        --dry: tiny sizes, and the compilations for Hopper alone

Errors are relative in the 2-norm, against float64. Wrong or failing variants are lines, not ends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baltoro.bench.kernels.replays import replay_seconds
from baltoro.kernels.kda import prefill
from baltoro.kernels.kda.launch import Columns, Config, Copies, Launch
from baltoro.kernels.kda.reference import l2_norm
from scripts.gpu.prefill_checks import BEGUN, BF16, F32, Case, attempt, default, fit, inputs, say

FOLDER = Path(tempfile.gettempdir())
# tokens, spans, heads, segments of each span to try
SHAPES = [(8192, 1, 96, (1,)), (65536, 1, 12, (11, 10, 22)), (8192, 1, 12, (11, 1, 8)), (8192, 8, 96, (1,))]
# seconds until which a variant has to be compiled and checked
PATIENCE = 32.0
# what is measured, and configuration
Variant = tuple[str, str, Config]


def variants() -> Iterator[Variant]:
    """Promising ones of all parts first."""
    now = replace(default(BF16), columns=None, copies=None)
    new = replace(now, columns=Columns(), copies=Copies())
    yield "prepare", "columns, 3 programs", new
    yield "scan", "copies", new
    yield "fragment", "copies", new
    yield "prepare", "columns, 2 programs", replace(new, columns=Columns(None))
    yield "prepare", "columns, 3 programs, chunks first", replace(new, columns=Columns(heads_first=False))
    yield "scan", "copies, not early", replace(new, copies=Copies(is_early=False))
    yield "prepare", "without Gluon", now
    yield "scan", "without Gluon", now
    yield "fragment", "without Gluon", now
    yield "prepare", "whole inverse", replace(now, has_blocks=False)
    yield "prepare", "8 warps", replace(now, bounded=Launch(128, 8, 1))
    yield "prepare", "8 warps, 2 programs", replace(now, bounded=Launch(128, 8, 1, 128))
    yield "scan", "128 rows", replace(now, scan=Launch(128, 8, 2))
    yield "scan", "32 rows", replace(now, scan=Launch(32, 4, 1))


def bench_call(
    shape: tuple[int, int, int, tuple[int, ...]], config: Config, pieces: int, kind: torch.dtype = BF16
) -> tuple[Any, ...]:
    """Inputs as the bench draws them, and the call. kind: of keys and queries."""
    tokens, num, heads, _ = shape
    torch.manual_seed(0)
    q, k = (l2_norm(torch.randn(tokens, heads, 128, device="cuda")).to(kind) for _ in range(2))
    v = torch.randn(tokens, heads, 128, device="cuda", dtype=BF16)
    g = -0.1 * torch.rand(tokens, heads, 128, device="cuda")
    state = torch.randn(num, heads, 128, 128, device="cuda") * 0.1
    layout = (tokens // num,) * num, (0,) * num, ()
    size = None if pieces == 1 else -(-tokens // num // 64 // pieces)
    call = prefill.plan_call(v, state, layout, config, chunk=64, is_bounded=True, segment_chunks=size)
    return call, (q, k, v, g, torch.rand(tokens, heads, device="cuda"))


def launch_part(part: str, call: prefill.Call, tensors: tuple[Tensor, ...], heads: int) -> Callable[[], object]:
    """One kernel alone, on what those before it make."""
    if part == "prepare":
        return partial(call.prepare, tensors, 0, heads, 128**-0.5)
    made = call.prepare(tensors, 0, heads, 128**-0.5)
    if part == "fragment":
        return partial(call.enter, made, tensors[2], 0, heads)
    entering = call.enter(made, tensors[2], 0, heads) if call.plan.fragments else call.state
    return partial(call.scan, made, tensors[2], entering, 0, heads)


def plainly(work: Callable[..., str], *rest: Any) -> str:
    """What it raises as an exception that any process can read."""
    torch.set_num_threads(1)
    try:
        return work(*rest)
    except Exception as error:  # noqa: BLE001
        raise RuntimeError(f"{type(error).__name__}: {str(error).strip()[-200:]}") from None


def warm(part: str, name: str, config: Config) -> str:
    """In a process of its own: is it right, also where it would leave its tensors; fills the cache on disk."""
    begun = time.monotonic()
    # a kernel that waits for ever goes with its process
    end = threading.Timer(PATIENCE, os._exit, (1,))
    end.daemon = True
    end.start()
    case = stored(128, BF16).to("cuda")
    for segments in (2, None):
        if not case.check(f"in its own process: {part} {name}, segments {segments}", config, True, segments):
            raise ValueError("wrong")
    for shape, kind in ((SHAPES[0], BF16), (SHAPES[1], BF16), (SHAPES[0], F32)):
        if part == "prepare" or kind == BF16:
            call, tensors = bench_call(shape, config, shape[3][0], kind)
            call.run(tensors, 0, shape[2], 128**-0.5)
            torch.cuda.synchronize()
    end.cancel()
    return f"{time.monotonic() - begun:.0f} s"


def stored(keys: int, dtype: torch.dtype) -> Case:
    """A case that was made once for all processes: 28 that each made it held each other up."""
    path = FOLDER / f"case-{keys}-{str(dtype)[6:]}.pt"
    if not path.exists():
        case = Case(keys, dtype)
        torch.save(case, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    found = torch.load(path, weights_only=False)
    assert isinstance(found, Case)
    return found


def warm_check(keys: int, dtype: torch.dtype, is_bounded: bool) -> str:
    """The same for `Case.check`."""
    layout = (1, 63, 130, 300, 17), (0, 64, 5, 0, 60), ((3, 128), (2, 59))
    tensors, state = inputs(511, 2, keys, dtype, "cuda"), torch.zeros(5, 2, keys, keys, device="cuda")
    for segments in (None, 2):
        config = fit(default(dtype), tensors[2], tensors[0])
        options = {"chunk": 64, "is_bounded": is_bounded, "segment_chunks": segments}
        call = prefill.plan_call(tensors[2], state, layout, config, **options)
        call.run(tensors, 0, 2, 0.1)
    torch.cuda.synchronize()
    return ""


def correct(device: str, jobs: dict[Any, AsyncResult[str]], until: float) -> None:
    """Defaults at both sizes and dtypes, bounded or not, cut or not."""
    for keys, dtype in ((128, BF16), (64, BF16), (128, F32), (64, F32)):
        case = attempt("case", lambda keys=keys, dtype=dtype: stored(keys, dtype).to(device))
        if not isinstance(case, Case):
            continue
        for is_bounded in (True, False):
            job = jobs.get((keys, dtype, is_bounded))
            if job is not None:
                name = f"compile {keys} {dtype} {is_bounded}"
                if attempt(name, partial(job.get, max(1.0, until - (time.monotonic() - BEGUN)))) is None:
                    continue
            for segments in (None, 2):
                name = f"K {keys} {str(dtype)[6:]} bounded {is_bounded} segments {segments}"
                attempt(name, partial(case.check, name, default(dtype), is_bounded, segments))


def sweep(jobs: list[tuple[Variant, AsyncResult[str]]], until: float) -> None:
    """Each kernel alone at the bench's shapes, then all of the best together."""
    rows: list[tuple[str, int, float, str]] = []
    best: dict[tuple[str, int], tuple[float, Config]] = {}
    for (part, name, config), job in jobs:
        now = time.monotonic() - BEGUN
        # all began together: who is not ready by then hangs
        left = min(until, max(PATIENCE, now + 1)) - now
        if left <= 0 or attempt(f"compile {part} {name}", partial(job.get, left)) is None:
            continue
        for n, shape in enumerate(SHAPES[:2]):
            if part == "fragment" and shape[3][0] == 1:
                continue
            us = attempt(f"time {part} {name}", partial(measure, part, config, shape, shape[3][0]))
            if isinstance(us, float):
                say(f"  {part} {name} at {shape[:3]}: {us:.0f} us")
                rows.append((part, n, us, name))
                if us < best.get((part, n), (1e9, config))[0]:
                    best[part, n] = us, config
    chosen = [
        ("best parts at 96 heads", joined({part: one for (part, n), (_, one) in best.items() if n == 0})),
        ("best parts at 12 heads", joined({part: one for (part, n), (_, one) in best.items() if n == 1})),
        ("without Gluon", replace(default(BF16), columns=None, copies=None)),
    ]
    for name, config in chosen:
        for shape in SHAPES:
            for pieces in shape[3]:
                if time.monotonic() - BEGUN < until + 4:
                    us = attempt(f"whole {name}", partial(measure, "whole", config, shape, pieces))
                    say(f"WHOLE {shape[:3]} in {pieces}: {us or 0:.0f} us, {name}")
        if time.monotonic() - BEGUN > until + 4:
            continue
        us = attempt(f"whole {name}", partial(measure, "whole", config, SHAPES[0], 1, F32))
        say(f"WHOLE {SHAPES[0][:3]}, FP32 keys and queries as `l2_norm` gives them: {us or 0:.0f} us, {name}")
    say(f"best: {chosen[0][1]}")
    say(f"best: {chosen[1][1]}")
    print("\nfragment includes the merge; floor: bytes moved at 4.24 TB/s")
    for part, n, us, name in sorted(rows):
        shape = SHAPES[n]
        print(f"{part:10} {shape[:3]!s:15} {us:8.0f} us {us / floor(part, shape):5.2f} x floor  {name}", flush=True)


def joined(found: dict[str, Config]) -> Config:
    """The parts that were fastest, of each one's configuration."""
    config = found.get("prepare", default(BF16))
    scan, fragment = found.get("scan", config), found.get("fragment", config)
    return replace(config, scan=scan.scan, fragment=fragment.fragment, copies=scan.copies)


def measure(
    part: str, config: Config, shape: tuple[int, int, int, tuple[int, ...]], pieces: int, kind: torch.dtype = BF16
) -> float:
    """us, by the bench's own helper on its own inputs, none of which fit a cache."""
    call, tensors = bench_call(shape, config, pieces, kind)
    work = partial(call.run, tensors, 0, shape[2], 128**-0.5)
    if part != "whole":
        work = launch_part(part, call, tensors, shape[2])  # type: ignore[assignment]
    return 1e6 * replay_seconds([work], repeats=7)


def floor(part: str, shape: tuple[int, int, int, tuple[int, ...]]) -> float:
    """us: q k v bf16 and g fp32 in, workspace out; workspace in, outputs out; w u k R in."""
    each = {"prepare": 1284 + 1160, "scan": 1160 + 256, "fragment": 776}[part]
    return 1e6 * shape[0] * shape[2] * each / 4.24e12


def dry() -> None:
    """No GPU: the checks at tiny sizes under the interpreter, or the compilations for Hopper."""
    from triton import knobs

    if knobs.runtime.interpret:
        case = Case(32, F32, 16)
        for is_bounded in (True, False):
            config = Config(Launch(16, 4, 1), Launch(16, 4, 1), Launch(16, 4, 1), is_direct=is_bounded)
            case.check(f"dry {is_bounded}", config, is_bounded, 2)
        return
    from scripts.gpu import compile_kda

    parts = [("bounded" if part == "prepare" else part, one) for part, _, one in variants()]
    with mock.patch.object(compile_kda, "cases", lambda: compile_kda.prefill_cases(parts)):
        compile_kda.main()
    launches = [one.columns for _, _, one in variants() if one.columns is not None]
    with mock.patch.object(compile_kda, "cases", lambda: compile_kda.gluon_cases(dict.fromkeys(launches))):
        compile_kda.main()


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--workers", type=int, default=max(2, min(14, (os.cpu_count() or 4) - 2)))
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.dry:
        dry()
        return
    for keys in (128, 64):
        for dtype in (BF16, F32):
            (FOLDER / f"case-{keys}-{str(dtype)[6:]}.pt").unlink(missing_ok=True)
            stored(keys, dtype)
    say("cases made")
    context = multiprocessing.get_context("forkserver")  # a process a task, forked from one that has imported the rest
    context.set_forkserver_preload(["torch", "triton", "scripts.gpu.prefill_checks"])
    pool = context.Pool(args.workers, maxtasksperchild=1)
    jobs = [(one, pool.apply_async(plainly, (warm, *one))) for one in variants()]
    cases = [(keys, dtype, bounded) for keys in (128, 64) for dtype in (F32, BF16) for bounded in (True, False)]
    checks = {case: pool.apply_async(plainly, (warm_check, *case)) for case in cases}
    attempt("sweep", lambda: sweep(jobs, args.seconds - 8))
    attempt("correct", lambda: correct("cuda", checks, args.seconds))
    say("end")
    pool.terminate()


if __name__ == "__main__":
    main()
