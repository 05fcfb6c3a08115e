"""Lab of the MXFP4 expert product on one GPU: is each variant right, what does each of its products take, which wins.

    python -m scripts.gpu.lab_experts --seconds 60      on the device
    python -m scripts.gpu.lab_experts --only "1024 rows,2048 rows"     these cases
    python -m scripts.gpu.lab_experts --dry             here: all variants compiled for sm_90

Cases as in baltoro/bench/kernels/moe.py, 112 experts resident. Variants are compiled by worker processes first. The
last lines, sorted: product, variant, us, times the floor.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from functools import partial
from itertools import product as product_of
from multiprocessing import get_context

import torch
from torch import Tensor

from baltoro.bench.kernels.moe import INNER, LATENT, PACKED_BYTES, RESIDENT, SITU, resident_experts
from baltoro.bench.kernels.timing import Ceilings, ceilings, graph_us
from baltoro.kernels.moe import slabs, tile_experts, tile_order
from baltoro.kernels.moe.experts import grouped
from baltoro.kernels.moe.permute import permute_experts
from baltoro.kernels.moe.products import TiledExperts
from baltoro.kernels.moe.tile_experts import Plan
from baltoro.kernels.moe.tiles import tile_table
from baltoro.kernels.quant import mxfp8
from scripts.gpu.lab_experts_cases import (
    ACTIVATION,
    CASES,
    DEVICE,
    EXACT_CASES,
    VARIANTS,
    Case,
    as_float32,
    case,
    configured,
    products,
    short,
    unwritten,
)

Compiled = dict[tuple[str, Plan | None], str]  # no plan: what `checks` runs; "" or what went wrong


def say(text: str) -> None:
    print(text, flush=True)


def product(experts: TiledExperts, c: Case, plan: Plan, *, is_w4a8: bool = False) -> Tensor:
    return tile_experts.run(
        c.z, c.ids, c.shares, experts, ACTIVATION, plan, is_pairs=c.is_pairs, fake_activations=is_w4a8
    )


def compile_one(name: str, plan: Plan | None) -> str:
    """In a worker: run a variant once on garbage, so that what it compiles lies in the cache, and an illegal access is
    its own; no variant: what `checks` runs. Returns "" or what went wrong.
    """
    torch.set_num_threads(1)
    try:
        torch.zeros(1, device=DEVICE).item()
    except RuntimeError:
        return "not tried: an earlier variant took this worker's device context along"
    try:
        experts, c = unwritten(DEVICE), case(name, DEVICE)
        if plan is not None:
            product(experts, c, plan)
        else:
            product(experts, c, configured(c), is_w4a8=True)
            if name in EXACT_CASES:
                product(experts, as_float32(c), tile_experts.EXACT)
            product(experts, c, VARIANTS[name][0], is_w4a8=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001 - a report of any failure is the purpose
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def gap(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def floors(limits: Ceilings, c: Case) -> dict[str, float]:
    num_hit, size = int((torch.bincount(c.ids.flatten()) > 0).sum()), LATENT * INNER
    return {
        name: limits.floor_us(num_hit * parts * size * PACKED_BYTES, 2.0 * c.ids.numel() * parts * size)
        for name, parts in (("first", 2), ("second", 1), ("whole", 3))
    }


def poison(device: str) -> None:
    """Free memory full of NaN, which the allocator hands out again."""
    torch.full((1 << 28,), float("nan"), device=device)


def checks(experts: TiledExperts, cases: dict[str, Case], compiled: Compiled) -> None:
    """Grouping against its table in torch, MXFP8 rounding against its reference, W4A8 and float32 against float64;
    W4A8 of a variant only where a worker ran it well."""
    for c, align in product_of(cases.values(), (1, slabs.ALIGN)):
        order, table = tile_order.grouped(c.ids, RESIDENT, 160, align)
        expected, tiles = tile_table(c.ids, RESIDENT, 160, align)
        used = tiles[0] < RESIDENT
        is_same = torch.equal(order, expected) and torch.equal(table[0], tiles[0])
        is_same = is_same and torch.equal(table[:, used], tiles[:, used])
        say(f"grouping by {align}, {c.name}: {'equal' if is_same else 'WRONG'}")
    x = torch.randn(64, LATENT, device=DEVICE, dtype=torch.bfloat16) * 30
    got = tile_order.arranged(x, None, 8, LATENT, num_active=1, is_rounded=True)
    same = tile_order.arranged(mxfp8.fake(x), None, 8, LATENT, num_active=1, is_rounded=False)
    say(f"MXFP8 rounding: {'equal' if torch.equal(got, same) else f'off by {gap(got, same.double()):.1e}'}")
    for c in cases.values():
        if c.exact is not None:
            tried = VARIANTS[c.name][0]
            is_well = not compiled.get((c.name, None), "") and not compiled.get((c.name, tried), "")
            for plan in dict.fromkeys((configured(c), tried) if is_well else (configured(c),)):
                poison(DEVICE)
                out = product(experts, c, plan, is_w4a8=True)[c.checked]
                say(f"W4A8, {c.name}, {short(plan)}: error {gap(out, c.exact):.2e}")
            if c.name in EXACT_CASES:
                out = product(experts, as_float32(c), tile_experts.EXACT)
                say(f"float32, {c.name}: error {gap(out, c.exact):.2e}")


def check_and_time(experts: TiledExperts, c: Case, plan: Plan) -> None:
    """One variant: its error, and if that is fine the times of the whole and of its products."""
    poison(DEVICE)
    outs = [product(experts, c, plan) for _ in range(3)]
    error = gap(outs[0][c.checked], c.exact) if c.exact is not None else float("nan")
    is_same = all(torch.equal(out, outs[0]) for out in outs)
    away = gap(outs[0], product(experts, c, configured(c)).double())  # of all tokens
    if not max(error, away) < 1.2e-2 or not bool(torch.isfinite(outs[0]).all()) or not is_same:
        same = "" if is_same else "not "
        say(f"{c.name}, {short(plan)}: WRONG, error {error:.2e}, of all {away:.2e}, {same}the same each time")
        return
    samples, inner = (5, 3) if c.name == "16352 rows" else (9, 5)
    whole = graph_us(partial(product, experts, c, plan), samples=samples, inner=inner)
    first, second = (graph_us(f, samples=samples, inner=inner) for f in products(experts, c, plan))
    c.times[plan] = (whole, first, second)
    say(f"{c.name}, {short(plan)}: error {error:.1e}, whole {whole:.1f}, first {first:.1f}, second {second:.1f} us")


def sweep(compiled: Compiled, experts: TiledExperts, cases: dict[str, Case], deadline: float) -> None:
    """The variants that compiled, in order; the others with what went wrong."""
    for (name, plan), wrong in compiled.items():
        label = f"{name}, {'checks' if plan is None else short(plan)}"
        if wrong:
            say(f"{label}: {wrong}")
        elif plan is None:
            continue
        elif time.monotonic() > deadline:
            say(f"{label}: time is up")
        else:
            try:
                check_and_time(experts, cases[name], plan)
            except Exception as error:  # noqa: BLE001 - reported, and the next one goes on
                say(f"{label}: {type(error).__name__}: {str(error)[:200]}")


def wholes(experts: TiledExperts, c: Case, limits: Ceilings) -> Iterator[str]:
    """The table: whole products, the fastest first; then what is configured, W4A8 too, and W4A8 of the fastest."""
    floor = floors(limits, c)
    ranked = sorted(c.times.items(), key=lambda pair: pair[1][0])
    for plan, (whole, first, second) in ranked:
        yield (
            f"{c.name:11} {short(plan):62} whole {whole:8.1f} us {whole / floor['whole']:5.2f} x floor, "
            f"first {first:8.1f} {first / floor['first']:5.2f}, second {second:8.1f} {second / floor['second']:5.2f}"
        )
    samples, inner = (5, 3) if c.name == "16352 rows" else (9, 5)
    plans = {"configured": configured(c)} | ({"fastest": ranked[0][0]} if ranked else {})
    for name, plan in plans.items():
        for is_w4a8 in (False, True):
            us = graph_us(partial(product, experts, c, plan, is_w4a8=is_w4a8), samples=samples, inner=inner)
            kind = "W4A8" if is_w4a8 else "W4A16"
            yield f"{c.name:11} {name} {kind}: {us:.1f} us, {us / floor['whole']:.2f} x floor"


def compile_all(limit: float, names: Sequence[str]) -> tuple[Compiled, TiledExperts, dict[str, Case]]:
    """Compile in workers, for `limit` seconds at most, and build inputs and references meanwhile.

    Nothing is timed before the workers are gone: they share the device.
    """
    longest = max(len(VARIANTS[name]) for name in names)
    queue: list[tuple[str, Plan | None]] = [(name, None) for name in names]
    queue += [(n, VARIANTS[n][i]) for i in range(longest) for n in names if i < len(VARIANTS[n])]
    begun = time.monotonic()
    pool = ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn"))
    futures = {key: pool.submit(compile_one, *key) for key in queue}
    weights = resident_experts(DEVICE)
    experts = permute_experts(weights)
    cases = {name: case(name, DEVICE) for name in names}
    for c in cases.values():
        at = c.checked
        c.exact = grouped(c.z[at].double(), c.ids[at], c.shares[at].double(), weights, activation=SITU)
    say(f"inputs and references at {time.monotonic() - begun:.0f} s")
    wait(futures.values(), timeout=max(1.0, limit - (time.monotonic() - begun)))
    end_workers(pool, futures.values())
    return {key: outcome(future) for key, future in futures.items()}, experts, cases


def end_workers(pool: ProcessPoolExecutor, futures: Iterable[Future[str]]) -> None:
    """Leave what has not begun, give what runs a while, and end what still does: a kernel may wait for ever."""
    workers = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    wait([future for future in futures if future.running()], timeout=8.0)
    is_stuck = any(future.running() for future in futures)
    for worker in workers:
        if is_stuck:
            worker.kill()
    for worker in workers:
        worker.join(5.0)


def outcome(future: Future[str]) -> str:
    """ "" or what went wrong in a worker."""
    if future.cancelled() or not future.done():
        return "not compiled in time"
    error = future.exception()
    return future.result() if error is None else repr(error)


def measure(seconds: float, names: Sequence[str]) -> None:
    """The lab, these cases."""
    begun = time.monotonic()
    compiled, experts, cases = compile_all(0.6 * seconds, names)
    say(f"compiled at {time.monotonic() - begun:.0f} s")
    sweep(compiled, experts, cases, begun + seconds - 8)
    say(f"swept at {time.monotonic() - begun:.0f} s")
    try:
        checks(experts, cases, compiled)
    except Exception as error:  # noqa: BLE001 - reported: the table below is worth more
        say(f"checks: {type(error).__name__}: {str(error)[:300]}")
    limits = ceilings()
    say(f"copy {limits.bytes_per_s / 1e12:.2f} TB/s, bf16 product {limits.flops_per_s / 1e12:.0f} TFLOP/s")
    for c in cases.values():
        for line in wholes(experts, c, limits):
            say(line)


def dry(names: Sequence[str]) -> int:
    """All variants of these cases compiled for sm_90."""
    from scripts.gpu.compile_experts import report

    plans = [(name, plan, CASES[name][2], "bf16") for name in names for plan in VARIANTS[name]]
    return report(plans)


def main() -> int:
    """Parse and go."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default=",".join(CASES), help="names of cases, with commas between")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    names = [name.strip() for name in options.only.split(",")]
    if options.dry:
        return dry(names)
    measure(options.seconds, names)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
