"""How the launches of a decode step follow each other: K3's rank slice, captured, with each form of overlap.

    python -m scripts.gpu.lab_chain --seconds 60 [--batches 1,2] [--dry]

A form is a set of the modules' constants. Each must leave the very sum that the plain order leaves; times are medians
of rounds in which every form has its turn. Last, a timeline of the fastest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from baltoro.bench.kernels.timeline import describe, timeline
from baltoro.bench.kernels.timing import Ceilings, ceilings, graph_us, wall_or_graph_us
from baltoro.bench.slice import LADDER, Slice, published_shape
from baltoro.kernels.attnres import fast as attnres
from baltoro.kernels.linear import fast as linear
from baltoro.kernels.moe import fast_glu, fast_route, tile_experts
from baltoro.kernels.norm import fast as norm
from scripts.gpu.lab_slice import tiny_shape

Change = tuple[Any, str, Any]
PLAIN: tuple[Change, ...] = (
    (norm, "IS_DEPENDENT", False), (norm, "LETS_GO", False), (fast_glu, "IS_DEPENDENT", False),
    (fast_glu, "LETS_GO", False), (tile_experts, "IS_DEPENDENT", False), (attnres, "LETS_GO", False),
    (fast_route, "LETS_GO", False),
)  # fmt: skip
SMALL: tuple[Change, ...] = ((norm, "IS_DEPENDENT", True), (fast_glu, "IS_DEPENDENT", True))
PICKS: tuple[Change, ...] = ((tile_experts, "IS_DEPENDENT", True),)
BOTH = SMALL + PICKS


def early(*modules: Any) -> tuple[Change, ...]:
    return tuple((one, "LETS_GO", True) for one in modules)


def rows(*sizes: int) -> tuple[Change, ...]:
    """Another cut of products of one row; more rows as they are."""
    choose = linear.choose_tiles
    return ((linear, "choose_tiles", lambda num: linear.Tiles(*sizes) if num == 1 else choose(num)),)


FORMS: dict[str, tuple[Change, ...]] = {
    "plain": (),
    "small": SMALL,
    "picks": PICKS,
    "small picks": BOTH,
    "all early": BOTH + early(norm, fast_glu, attnres, fast_route),
    "norm early": BOTH + early(norm),
    "glu early": BOTH + early(fast_glu),
    "norm glu early": BOTH + early(norm, fast_glu),
    "mix early": BOTH + early(attnres),
    "select early": BOTH + early(fast_route),
    "all early, norm inside": BOTH + early(norm, fast_glu, attnres, fast_route) + ((linear, "MAX_NORMED", 2048),),
    "all early, 1 row": BOTH + early(norm, fast_glu, attnres, fast_route) + rows(1, 1, 8192, 1, 4),
    "all early, 8 warps": BOTH + early(norm, fast_glu, attnres, fast_route) + rows(1, 2, 8192, 1, 8),
    "all early, 4 rows": BOTH + early(norm, fast_glu, attnres, fast_route) + rows(1, 4, 8192, 1, 8),
    "all early, steps": BOTH + early(norm, fast_glu, attnres, fast_route) + rows(1, 2, 1024, 7, 4),
}


def say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, value in (*PLAIN, *changes):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def sum_of(one: Slice) -> torch.Tensor:
    """What a captured step leaves, three times over."""
    one.restore()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = one().settled().prefix
    assert out is not None
    found = []
    for _ in range(3):
        one.restore()
        out.fill_(float("nan"))
        graph.replay()
        found.append(out.clone())
    return torch.stack(found)


def right(one: Slice) -> dict[str, tuple[Change, ...]]:
    """The forms that leave what the plain one does, compiled."""
    exact, fine = None, {}
    for name, changes in FORMS.items():
        try:
            with changed(changes):
                one()
                got = sum_of(one)
        except Exception as error:  # noqa: BLE001 - a line, whatever went wrong
            say(f"{name}: FAILED {type(error).__name__}: {str(error)[:300]}")
            continue
        exact = got[:1] if exact is None else exact
        gap = float((got.double() - exact.double()).norm() / exact.double().norm())
        say(f"{name}: gap {gap:.1e}")
        if gap < 8e-3:
            fine[name] = changes
    return fine


def measured(found: Ceilings, batch: int, until: float) -> None:
    one = Slice(published_shape(4096), batch, dtype=torch.bfloat16, device="cuda")
    with changed(()):
        one()
        one.prepare(LADDER[-2])
        floor = 1e6 * sum(one.bytes_by_part().values()) / found.bytes_per_s
    fine = right(one)
    times: dict[str, list[float]] = {name: [] for name in fine}
    for turn in range(4):
        for name, changes in fine.items():
            if time.perf_counter() < until or not turn:
                with changed(changes):
                    times[name].append(graph_us(one, samples=9, inner=10))
    ranked = sorted((statistics.median(us), name, us) for name, us in times.items())
    for us, name, every in ranked:
        say(f"batch {batch}: {us:7.1f} us {floor / us:6.1%}  {name}   ({', '.join(f'{t:.1f}' for t in every)})")
    with changed(fine[ranked[0][1]]):
        say(f"batch {batch}, {ranked[0][1]}:\n{describe(timeline(one))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batches", default="1,2")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    began, batches = time.perf_counter(), [int(text) for text in args.batches.split(",")]
    if args.dry:
        one = Slice(tiny_shape(), 1, dtype=torch.float32, device="cpu")
        for name, changes in FORMS.items():
            with changed(changes):
                say(f"{name}: {wall_or_graph_us(one, False):.0f} us on this machine")
        return
    found = ceilings()
    say(f"copy {found.bytes_per_s / 1e12:.2f} TB/s")
    with torch.no_grad():
        for place, batch in enumerate(batches):
            measured(found, batch, began + args.seconds * (place + 1) / len(batches))


if __name__ == "__main__":
    main()
