"""What stands before and behind KDA's chunk form on one GPU: checked, then timed beside the reference.

    python -m scripts.gpu.lab_mix [--seconds 30]        --dry: tiny sizes, what a CPU can do of it

Times are graph replays; floor: bytes read once and written once at this run's rate of a copy. Inputs and outputs of
4096 tokens fit the 50 MB of L2 only in part, so those of three sets take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from baltoro.bench.kernels.timing import ceilings, graph_us
from baltoro.kernels.kda import enter, fast_enter
from baltoro.kernels.kda.fast_enter import Tile
from baltoro.kernels.kda.fused_reference import MixerWeights
from baltoro.kernels.norm import fast as fast_norm
from baltoro.kernels.norm import reference as norm
from baltoro.kernels.spans import Spans

# most promising first
ENTER_TILES = (
    Tile(8, 4, 4), Tile(8, 8, 4), Tile(8, 16, 4), Tile(16, 8, 8), Tile(4, 8, 2), Tile(16, 4, 4), Tile(32, 1, 4),
    Tile(4, 16, 2), Tile(16, 4, 8),
)  # fmt: skip
GATED = ((4096, 4), (8192, 4), (2048, 4), (4096, 8), (8192, 8), (2048, 2))
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


def check(tokens: int, num: int, heads: int, width: int, device: str, dtype: torch.dtype, tile: Tile) -> str:
    """Errors against the reference in the same dtype, which rounds at the same places."""
    weights, spans = weights_of(heads, width, device), Spans.build((tokens // num,) * num, (9,) * num, device)
    x, raw, b, gate, o, history = inputs(tokens, num, heads, width, device, dtype)
    borders = tuple((n, 64) for n in range(num) if tokens // num > 64)
    layout = {"spans": spans, "history": history, "borders": borders}
    made, after = fast_enter.launch(x, raw, b, weights, tile=tile, **layout)
    plain, kept = enter.enter(x, raw, b, weights, **layout)
    gaps = [f"{name} {gap(a, c):.1e}" for name, a, c in zip(made._fields, made, plain, strict=True)]
    gaps.append(f"history {'equal' if torch.equal(after, kept) else 'WRONG'}")
    got = fast_norm.gated_launch(o, gate, weights.norm, EPS, dtype, *GATED[0])
    gaps.append(f"norm {gap(got, norm.gated_rms_norm(o, gate, weights.norm, EPS, dtype)):.1e}")
    return ", ".join(gaps)


def rotated(work: Callable[[Inputs], object], sets: list[Inputs]) -> float:
    """us of one of them."""
    kept: list[object] = []

    def launch() -> None:
        kept.clear()
        kept.extend(work(one) for one in sets)

    return graph_us(launch, samples=5, inner=3) / len(sets)


def measured(tokens: int, num: int, seconds: float, bytes_per_s: float) -> None:
    """The sweep of one shape, until so many seconds are spent."""
    began = time.perf_counter()
    weights, spans = weights_of(HEADS, WIDTH, "cuda"), Spans.build((tokens // num,) * num, (9,) * num, "cuda")
    sets = [inputs(tokens, num, HEADS, WIDTH, "cuda", BF16) for _ in range(SETS if tokens < 20000 else 1)]
    size = tokens * HEADS * WIDTH
    floors = [1e6 * values / bytes_per_s for values in (2 * 3 * size * 2 + size * 2 + size * 4, 3 * size * 2)]

    def plain_enter(one: Inputs) -> object:
        x, raw, b, _, _, history = one
        return enter.enter(x, raw, b, weights, spans=spans, history=history)

    def plain_norm(one: Inputs) -> object:
        return norm.gated_rms_norm(one[4], one[3], weights.norm, EPS, BF16)

    rows: list[tuple[float, float, str]] = []
    shape = f"{tokens} tokens in {num}"
    for name, work, floor in (("enter", plain_enter, floors[0]), ("norm", plain_norm, floors[1])):
        say(f"{shape}: {name} in plain torch {rotated(work, sets):.1f} us, floor {floor:.1f}")
    cases: list[tuple[str, float, Callable[[Inputs], object]]] = []
    for tile, gated in zip(ENTER_TILES, cycle(GATED), strict=False):

        def fast(one: Inputs, tile: Tile = tile) -> object:
            x, raw, b, _, _, history = one
            return fast_enter.launch(x, raw, b, weights, spans, history, (), tile)

        def fast_gated(one: Inputs, gated: tuple[int, int] = gated) -> object:
            return fast_norm.gated_launch(one[4], one[3], weights.norm, EPS, BF16, *gated)

        cases += [(f"enter {tile.groups}x{tile.rows} {tile.warps} warps", floors[0], fast)]
        cases += [(f"norm {gated[0]} values {gated[1]} warps", floors[1], fast_gated)]
    for name, floor, work in {case[0]: case for case in cases}.values():
        if rows and time.perf_counter() - began > seconds:
            say(f"{shape}: time is spent before {name}")
            break
        try:
            time_us = rotated(work, sets)
            rows.append((time_us, time_us / floor, name))
        except Exception as error:  # noqa: BLE001 - a line, not the end
            say(f"{name} FAILED {type(error).__name__}: {str(error)[:200]}")
    for time_us, over, name in sorted(rows, key=lambda row: (row[2].split()[0], row[0])):
        say(f"  {shape}: {time_us:8.1f} us {over:5.2f} x floor  {name}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    device, dtypes = ("cpu", (torch.float32,)) if args.dry else ("cuda", (BF16, torch.float32))
    sizes = (70, 2, 2, 16) if args.dry else (4096, 4, HEADS, WIDTH)
    for dtype in dtypes:
        for tile in ENTER_TILES[: 2 if args.dry else None]:
            try:
                say(f"{tile} {str(dtype)[6:]}: {check(*sizes, device, dtype, tile)}")
            except Exception as error:  # noqa: BLE001 - a line, not the end
                say(f"{tile} {dtype} FAILED {type(error).__name__}: {str(error)[:200]}")
    if args.dry:
        return
    began, rate = time.perf_counter(), ceilings().bytes_per_s
    say(f"copies {rate / 1e12:.2f} TB/s")
    for n, shape in enumerate(SHAPES):
        left = args.seconds - (time.perf_counter() - began)
        measured(*shape, left / (len(SHAPES) - n), rate)


if __name__ == "__main__":
    main()
