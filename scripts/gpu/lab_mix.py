"""What stands before and behind KDA's chunk form on one GPU: checked, then timed beside the reference.

    python -m scripts.gpu.lab_mix [--seconds 30]        --dry: tiny sizes, what a CPU can do of it

Times are graph replays; floor: bytes read once and written once at this run's rate of a copy. Inputs and outputs of
4096 tokens fit the 50 MB of L2 only in part, so those of three sets take turns. Checks run in processes of their own,
beside each other, and leave what they compiled in the cache on disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from baltoro.bench.kernels.timing import ceilings, wall_or_graph_us
from baltoro.kernels.kda import enter, fast_enter
from baltoro.kernels.kda.fast_enter import Tile
from baltoro.kernels.kda.fused_reference import MixerWeights
from baltoro.kernels.norm import fast as fast_norm
from baltoro.kernels.norm import reference as norm
from baltoro.kernels.spans import Spans

# most promising first
ENTER_TILES = (
    Tile(8, 4, 4), Tile(8, 8, 4), Tile(16, 4, 8), Tile(4, 8, 2), Tile(16, 4, 4), Tile(8, 16, 4), Tile(32, 1, 4)
)  # fmt: skip
GATED = ((4096, 4), (8192, 4), (2048, 4), (4096, 8), (2048, 2))
"""Values of a program, warps."""
BF16 = torch.bfloat16
EPS, SETS, HEADS, WIDTH, TAPS = 1e-5, 3, 12, 128, 4
SHAPES = ((4096, 1), (4096, 4), (65536, 1))
"""Tokens, spans."""


def say(line: str) -> None:
    print(line, flush=True)


def gap(got: Tensor, expected: Tensor) -> float:
    """In the 2-norm, by parts of rows: a float64 copy of all would be large."""
    pairs = zip(got.split(8192), expected.split(8192), strict=True)
    sums = [((a.double() - b.double()).square().sum(), b.double().square().sum()) for a, b in pairs]
    return float((sum(top for top, _ in sums) / sum(below for _, below in sums)) ** 0.5)


def weights_of(heads: int, width: int, device: str) -> MixerWeights:
    conv = torch.randn(3 * heads * width, TAPS, device=device) * 0.5
    a_log, bias = torch.randn(heads, device=device), torch.randn(heads, width, device=device)
    return MixerWeights(conv, a_log, bias, torch.rand(width, device=device) + 0.5, EPS, -5.0, width**-0.5)


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(tokens: int, spans: int, heads: int, width: int, device: str, dtype: torch.dtype) -> Inputs:
    """x, raw, b, gate, o, history: x, b and gate lie in one projection, as in the model."""
    size = heads * width
    merged = torch.randn(tokens, 4 * size + width + 16, device=device, dtype=dtype)
    x, gate, b = torch.split(merged[:, : 4 * size + heads], [3 * size, size, heads], dim=-1)
    raw, o = (torch.randn(tokens, heads, width, device=device, dtype=dtype) for _ in range(2))
    history = torch.randn(spans, TAPS - 1, 3 * size, device=device, dtype=dtype)
    return x, raw, b, gate.unflatten(-1, (heads, width)), o, history


@torch.no_grad()
def check(case: tuple[Tile, torch.dtype, tuple[int, int]], sizes: tuple[int, int, int, int], device: str) -> str:
    """A line: errors against the reference in the same dtype, which rounds at the same places."""
    (tile, dtype, gated), (tokens, num, heads, width) = case, sizes
    name = f"{tile.groups}x{tile.rows} {tile.warps} warps, norm {gated}, {str(dtype)[6:]}"
    try:
        torch.manual_seed(0)
        weights, spans = weights_of(heads, width, device), Spans.build((tokens // num,) * num, (9,) * num, device)
        x, raw, b, gate, o, history = inputs(tokens, num, heads, width, device, dtype)
        borders = tuple((n, 64) for n in range(num) if tokens // num > 64)
        made, after = fast_enter.launch(x, raw, b, weights, spans, history, borders, tile)
        plain, kept = enter.enter(x, raw, b, weights, spans=spans, history=history, borders=borders)
        gaps = [f"{part} {gap(a, c):.1e}" for part, a, c in zip(made._fields, made, plain, strict=True)]
        gaps.append(f"history {'equal' if torch.equal(after, kept) else 'WRONG'}")
        got = fast_norm.gated_launch(o, gate, weights.norm, EPS, dtype, *gated)
        gaps.append(f"norm {gap(got, norm.gated_rms_norm(o, gate, weights.norm, EPS, dtype)):.1e}")
        return f"{name}: {', '.join(gaps)}"
    except Exception as error:  # noqa: BLE001 - a line, not the end
        return f"{name} FAILED {type(error).__name__}: {str(error)[:200]}"


def rotated(work: Callable[[Inputs], object], sets: list[Inputs]) -> float:
    """us of one of them."""
    kept: list[object] = []

    def launch() -> None:
        kept.clear()
        kept.extend(work(one) for one in sets)

    return wall_or_graph_us(launch, True) / len(sets)


def works(weights: MixerWeights, spans: Spans) -> list[tuple[str, bool, Callable[[Inputs], object]]]:
    """(name, is it the norm, what it does), references first."""

    def plain_enter(one: Inputs) -> object:
        return enter.enter(*one[:3], weights, spans=spans, history=one[5])

    def plain_norm(one: Inputs) -> object:
        return norm.gated_rms_norm(one[4], one[3], weights.norm, EPS, one[4].dtype)

    def fast(tile: Tile, one: Inputs) -> object:
        return fast_enter.launch(*one[:3], weights, spans, one[5], (), tile)

    def gated(shape: tuple[int, int], one: Inputs) -> object:
        return fast_norm.gated_launch(one[4], one[3], weights.norm, EPS, one[4].dtype, *shape)

    found: list[tuple[str, bool, Callable[[Inputs], object]]] = [
        ("enter, plain torch", False, plain_enter), ("norm, plain torch", True, plain_norm),
    ]  # fmt: skip
    for n, tile in enumerate(ENTER_TILES):
        found.append((f"enter {tile.groups}x{tile.rows} {tile.warps} warps", False, partial(fast, tile)))
        if n < len(GATED):
            found.append((f"norm {GATED[n][0]} values {GATED[n][1]} warps", True, partial(gated, GATED[n])))
    return found


def measure(sizes: tuple[int, int, int, int], device: str, dtype: torch.dtype, seconds: float, rate: float) -> None:
    """The sweep of one shape, until so many seconds are spent; rate in bytes/s."""
    began, (tokens, num, heads, width) = time.perf_counter(), sizes
    weights, spans = weights_of(heads, width, device), Spans.build((tokens // num,) * num, (9,) * num, device)
    sets = [inputs(*sizes, device, dtype) for _ in range(SETS if tokens < 20000 else 1)]
    size, item = tokens * heads * width, dtype.itemsize
    # q, k, v in and out, the raw gate, its decay in fp32; o and gate in, the result out
    floors = [1e6 * num_bytes / rate for num_bytes in (7 * size * item + 4 * size, 3 * size * item)]
    rows: list[tuple[bool, float, str]] = []
    for name, is_norm, work in works(weights, spans):
        if len(rows) > 3 and time.perf_counter() - began > seconds:
            say(f"time is spent before {name}")
            break
        try:
            rows.append((is_norm, rotated(work, sets), name))
        except Exception as error:  # noqa: BLE001 - a line, not the end
            say(f"{name} FAILED {type(error).__name__}: {str(error)[:200]}")
    for is_norm, time_us, name in sorted(rows):
        over = time_us / floors[is_norm]
        say(f"  {tokens} tokens in {num}: {time_us:8.1f} us {over:6.2f} x {floors[is_norm]:.1f}  {name}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    if args.dry:
        say(check((ENTER_TILES[0], torch.float32, GATED[0]), (70, 2, 2, 16), "cpu"))
        measure((40, 2, 2, 16), "cpu", torch.float32, 0.0, 1e12)
        return
    cases = [(tile, BF16, GATED[n % len(GATED)]) for n, tile in enumerate(ENTER_TILES)]
    cases.append((ENTER_TILES[0], torch.float32, GATED[0]))
    with multiprocessing.get_context("spawn").Pool(len(cases), maxtasksperchild=1) as pool:
        for line in pool.imap(partial(check, sizes=(4096, 4, HEADS, WIDTH), device="cuda"), cases):
            say(line)
    rate = ceilings().bytes_per_s
    say(f"copies {rate / 1e12:.2f} TB/s, {time.perf_counter() - began:.0f} s so far")
    for n, (tokens, num) in enumerate(SHAPES):
        left = args.seconds - (time.perf_counter() - began)
        measure((tokens, num, HEADS, WIDTH), "cuda", BF16, left / (len(SHAPES) - n), rate)


if __name__ == "__main__":
    main()
