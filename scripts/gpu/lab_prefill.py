"""The KDA chunk form on a GPU: which compiled piece is wrong, then times of every kernel over its configurations.

    python -m scripts.gpu.lab_prefill --seconds 60        --dry: tiny sizes, and the compilations for Hopper alone

Errors are relative in the 2-norm, against float64. Wrong or failing variants are lines, not ends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baltoro.kernels.kda import prefill
from baltoro.kernels.kda.launch import Config, Launch
from baltoro.kernels.kda.reference import l2_norm
from scripts.gpu.prefill_checks import BEGUN, BF16, F32, Case, attempt, default, fit, gap, inputs, say

# most promising first: channels, warps, stages, registers. `bounded` and `prepare` are two kernels for one purpose.
BOUNDED = [
    Launch(128, 4, 1), Launch(128, 8, 1), Launch(64, 4, 1), Launch(128, 8, 1, 128), Launch(128, 4, 1, 168),
]  # fmt: skip
PREPARES = [Launch(64, 4, 1)]
SCANS = [Launch(64, 4, 3), Launch(128, 8, 2), Launch(32, 4, 1)]
FRAGMENTS = [Launch(128, 4, 2), Launch(128, 8, 3), Launch(128, 4, 3), Launch(128, 4, 1)]
FIRSTS = {"bounded": BOUNDED[0], "scan": SCANS[0], "fragment": FRAGMENTS[0], "prepare": PREPARES[0]}
# (kernel, form, shape) -> microseconds, how launched
Times = dict[tuple[str, bool, int], list[tuple[float, Launch]]]
FOLDER = Path(tempfile.gettempdir())
# tokens, spans, heads, segments of each span to try
SHAPES = [(8192, 1, 96, (1,)), (65536, 1, 12, (11, 10, 8, 16, 22)), (8192, 1, 12, (11, 1, 8, 4)), (8192, 8, 96, (1,))]


# all defaults, but small enough for what the direct form adds
SHORT = replace(default(BF16), scan=Launch(128, 8, 2), fragment=Launch(128, 8, 3), is_direct=True)
# in the direct form
DIRECT = (
    ("bounded", Launch(128, 4, 1)), ("scan", Launch(128, 8, 2)), ("fragment", Launch(128, 4, 2)),
    ("bounded", Launch(128, 8, 1)), ("scan", Launch(64, 4, 2)), ("fragment", Launch(64, 4, 2)),
)  # fmt: skip


def variants() -> Iterator[tuple[str, Config]]:
    """Defaults with one part changed, promising ones of all parts first."""
    direct = iter(DIRECT)
    for n in range(len(BOUNDED)):
        for part, found in (("bounded", BOUNDED), ("scan", SCANS), ("fragment", FRAGMENTS), ("prepare", PREPARES)):
            if n < len(found):
                one = replace(default(BF16), **{part: found[n]})
                yield part, replace(one, bounded=None) if part == "prepare" else one
        if n == 0:
            yield "bounded", replace(default(BF16), has_blocks=False)
        for part, launch in islice(direct, 3):
            yield part, replace(SHORT, **{part: launch})


def bench_call(shape: tuple[int, int, int, tuple[int, ...]], config: Config, pieces: int) -> tuple[Any, ...]:
    """Inputs as the bench draws them, and the call."""
    tokens, num, heads, _ = shape
    torch.manual_seed(0)
    q, k = (l2_norm(torch.randn(tokens, heads, 128, device="cuda", dtype=BF16)) for _ in range(2))
    v = torch.randn(tokens, heads, 128, device="cuda", dtype=BF16)
    g = -0.1 * torch.rand(tokens, heads, 128, device="cuda")
    state = torch.randn(num, heads, 128, 128, device="cuda") * 0.1
    layout = (tokens // num,) * num, (0,) * num, ()
    size = None if pieces == 1 else -(-tokens // num // 64 // pieces)
    call = prefill.plan_call(v, state, layout, config, chunk=64, is_bounded=True, segment_chunks=size)
    return call, (q, k, v, g, torch.rand(tokens, heads, device="cuda"))


def blank(call: prefill.Call, heads: int) -> prefill.Made:
    """What `call.prepare` would give, zeros."""
    num, keys, values, size = len(call.plan.chunks), *call.shape.values()
    second = size if call.config.is_direct else values
    made = [torch.zeros(num, heads, size, n, device="cuda", dtype=BF16) for n in (keys, second, keys, keys, size)]
    return (*made, torch.zeros(num, heads, keys, device="cuda"))  # type: ignore[return-value]


def launch_part(part: str, call: prefill.Call, tensors: tuple[Tensor, ...], heads: int) -> Callable[[], object]:
    """One kernel alone, on zeros where others would have to run before it."""
    if part in ("prepare", "bounded"):
        return partial(call.prepare, tensors, 0, heads, 0.1)
    made = blank(call, heads)
    if part == "fragment":
        return partial(call.enter, made, tensors[2], 0, heads)
    entering = torch.zeros(len(call.plan.segments), heads, 128, 128, device="cuda")
    return partial(call.scan, made, tensors[2], entering, 0, heads)


def plainly(work: Callable[..., str], *rest: Any) -> str:
    """What it raises as an exception that any process can read."""
    torch.set_num_threads(1)
    try:
        return work(*rest)
    except Exception as error:  # noqa: BLE001
        raise RuntimeError(f"{type(error).__name__}: {str(error).strip()[-200:]}") from None


def warm(part: str, config: Config) -> str:
    """In a process of its own: fill the cache on disk with what the main one will launch. Small, same signatures."""
    begun = time.monotonic()
    for pieces in (1, 4):
        if part == "fragment" and pieces == 1:
            continue
        call, tensors = bench_call((2048, 1, 12, ()), config, pieces)
        launch_part(part, call, tensors, 12)()
        if part in ("prepare", "bounded"):
            break
    torch.cuda.synchronize()
    for shape in SHAPES[:2]:  # an illegal access ends the context: better this one's
        if part == "fragment" and shape[3][0] == 1:
            continue
        call, tensors = bench_call(shape, config, shape[3][0])
        launch_part(part, call, tensors, shape[2])()
    torch.cuda.synchronize()
    if not stored(128, BF16).to("cuda").check(f"in its own process: {part} {getattr(config, part)}", config, True, 2):
        raise ValueError("wrong")
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


def sweep(jobs: list[tuple[str, Config, AsyncResult[str]]], until: float) -> None:
    """Every kernel's configurations: right at ragged spans, then timed at the bench's shapes."""
    from baltoro.bench.kernels.timing import graph_us

    case, rows = stored(128, BF16).to("cuda"), []
    times: Times = {}
    begun = {False: 0, True: 0}
    for part, config, job in jobs:
        one, is_direct = getattr(config, part), config.is_direct
        name = f"{part} {one}{' direct' * is_direct}{' whole inverse' * (not config.has_blocks)}"
        left = until - (time.monotonic() - BEGUN)
        if left < 1 or attempt(f"compile {name}", partial(job.get, left)) is None:
            continue
        if not attempt(name, partial(case.check, name, config, True, 2)):
            continue
        begun[is_direct] += 1
        if begun[is_direct] == 3:  # the first one of every kernel is compiled
            whole({}, is_direct, graph_us, until)
        for n, shape in enumerate(SHAPES[:2]):
            pieces = shape[3][0]
            if part == "fragment" and pieces == 1:
                continue

            def measure(shape: Any = shape, pieces: int = pieces, part: str = part, config: Config = config) -> float:
                call, tensors = bench_call(shape, config, pieces)
                work = launch_part(part, call, tensors, shape[2])
                return graph_us(work, samples=5, inner=2)

            us = attempt(f"time {name}", measure)
            if isinstance(us, float):
                times.setdefault((part, is_direct, n), []).append((us, one))
                say(f"  {name} at {shape[:3]}: {us:.0f} us")
    for is_direct in (False, True):
        whole(times, is_direct, graph_us, until + 5)
    for (part, is_direct, n), found in sorted(times.items()):
        for us, one in sorted(found, key=lambda pair: pair[0])[:5]:
            name, shape = part + " direct" * is_direct, SHAPES[n]
            rows.append(f"{name:15} {shape[:3]!s:15} {us:8.0f} us {us / floor(part, shape):5.2f} x floor  {one}")
    print("\n".join(["", "fragment includes the merge; floor: bytes moved at 4.24 TB/s", *rows]), flush=True)
    attempt("cut", cut_gap)


def floor(part: str, shape: tuple[int, int, int, tuple[int, ...]]) -> float:
    """us: q k v bf16 and g fp32 in, workspace out; workspace in, outputs out; w u k R in."""
    each = {"prepare": 1284 + 1160, "bounded": 1284 + 1160, "scan": 1160 + 256, "fragment": 776}[part]
    return 1e6 * shape[0] * shape[2] * each / 4.24e12


def cut_gap() -> None:
    """What cutting a long span changes: with fragments of bf16 and of TF32 products, against the uncut one."""
    shape, found = SHAPES[1], {}
    tokens, _, heads, (pieces, *_) = shape
    for name, count, kind in (("uncut", 1, ""), ("bf16", pieces, "bf16"), ("tf32", pieces, "tf32")):
        call, tensors = bench_call(shape, default(BF16), count)
        if kind == "tf32":
            call = replace(call, kinds=replace(call.kinds, fragment=kind))
            call = replace(call, config=replace(call.config, fragment=Launch(64, 4, 2)))
        call.run(tensors, 0, heads, 128**-0.5)
        found[name] = call.out, call.after
    for name in ("bf16", "tf32"):
        gaps = [gap(got, exact) for got, exact in zip(found[name], found["uncut"], strict=True)]
        say(f"CUT {tokens} tokens in {pieces}, {name} fragments, against uncut: o {gaps[0]:.1e} states {gaps[1]:.1e}")


def whole(times: Times, is_direct: bool, graph_us: Callable[..., float], until: float) -> None:
    """All launches with the best of each kernel over the segments to try; without times the first of each."""
    for shape in SHAPES if times else SHAPES[:2]:
        like = 0 if shape[2] == 96 else 1
        best = {part: min(times.get((part, is_direct, like), [(0.0, one)]), key=lambda pair: pair[0])[1]
                for part, one in FIRSTS.items()}  # fmt: skip
        config = Config(**best, is_direct=is_direct)
        for pieces in shape[3] if times else shape[3][:1]:
            if time.monotonic() - BEGUN > until:
                continue

            def measure(shape: Any = shape, config: Config = config, pieces: int = pieces) -> float:
                call, tensors = bench_call(shape, config, pieces)
                return graph_us(partial(call.run, tensors, 0, shape[2], 0.1), samples=5, inner=2)

            us = attempt(f"whole {shape[:3]}", measure)
            if isinstance(us, float):
                name = " direct" * is_direct + (f" {[*best.values()]}" if times else " first")
                say(f"WHOLE {shape[:3]} {pieces} segments{name}: {us:.0f} us")


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

    with mock.patch.object(compile_kda, "cases", lambda: compile_kda.prefill_cases(variants())):
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
    jobs = [(part, config, pool.apply_async(plainly, (warm, part, config))) for part, config in variants()]
    cases = [(keys, dtype, bounded) for keys in (128, 64) for dtype in (F32, BF16) for bounded in (True, False)]
    checks = {case: pool.apply_async(plainly, (warm_check, *case)) for case in cases}
    attempt("sweep", lambda: sweep(jobs, args.seconds - 8))
    attempt("correct", lambda: correct("cuda", checks, args.seconds))
    say("end")
    pool.terminate()


if __name__ == "__main__":
    main()
