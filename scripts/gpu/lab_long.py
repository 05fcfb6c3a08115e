"""Latent attention over long requests on one GPU: right first, then where the time beside the keys goes.

    PYTHONPATH=/tmp/site2:. python3 -m scripts.gpu.lab_long --seconds 60
    python -m scripts.gpu.lab_long --dry                       (compiles for Hopper: registers, shared memory)
    TRITON_INTERPRET=1 python -m scripts.gpu.lab_long --dry    (tiny sizes on a CPU, no times)

What to set: `mla.split_decode.choose_tiles` (ahead, direct, opens), MERGE_VALUES and MERGE_WARPS there, and
`mla.fast_absorb.IS_DEPENDENT`. Method: `lab_mla.py`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baltoro.kernels.mla import absorb, fast_absorb, reference, split_decode
from baltoro.kernels.mla.split_decode import Tiles
from scripts.gpu import lab_mla
from scripts.gpu.lab_mla_cases import SMALL, Case, Problem, attention, device_of, gap

NOW = Tiles(16, 64, 2, 4, bulk=True)
BOTH = replace(NOW, ahead=2, opens=True)
FORMS = [
    BOTH, NOW, replace(NOW, ahead=2), replace(NOW, opens=True), replace(NOW, ahead=1, opens=True),
    replace(NOW, direct=True), replace(BOTH, direct=True), replace(NOW, ahead=1), NOW,
]  # fmt: skip
WIDE = Tiles(64, 64, 2, 8, bulk=True)
WIDES = [WIDE, replace(WIDE, ahead=2, opens=True), replace(WIDE, direct=True), replace(WIDE, ahead=2)]
SPLITS, OPTIONS = 128, {"latent": 512, "scale": 192**-0.5}


def ragged(tiles: Tiles, heads: int, device: str) -> float:
    """The widest gap from FP64 over ragged requests, NaN behind them and in what is not written."""
    found = 0.0
    for window, splits in ((1, None), (1, 3), (2, 5), (8, 70), (1, 1)):
        lengths = torch.tensor([window, 64, 65, 1000, 4097], device=device)
        table = torch.randperm(399, device=device)[:330].view(5, 66) + 1
        kv = torch.randn(400, 64, 2, 576, device=device).bfloat16()[:, :, 1]
        table[1:3] = table[0]  # requests may share pages
        q = torch.randn(5, window, heads, 576, device=device).bfloat16()
        exact = reference.attend_absorbed(q.double(), kv.double(), table, lengths, **OPTIONS)
        kv[table[4, 64], 1:] = torch.nan
        got = split_decode.attend_absorbed(q, kv, table, lengths, splits=splits, tiles=tiles, **OPTIONS)
        live = exact[1] > -torch.inf
        found = max(found, gap(got[0], exact[0]), gap(got[1][live], exact[1][live]))
        found += float(not torch.equal(got[1] > -torch.inf, live))
        if device == "cpu":
            break
    return found


def overlapping(tiles: Tiles, device: str) -> float:
    """0 if calls of a graph, which may run beside each other and take each other's memory, give what they give alone
    in every bit."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # or a kernel that fills would stand between
    kv, table = torch.randn(301, 64, 576, device=device).bfloat16(), torch.randperm(300, device=device).view(1, 300) + 1
    queries = torch.randn(12, 1, 12, 576, device=device).bfloat16()
    lengths = [torch.tensor([19200 - 700 * n], device=device) for n in range(len(queries))]

    def attend(n: int) -> Tensor:
        return split_decode.attend_absorbed(queries[n], kv, table, lengths[n], tiles=tiles, **OPTIONS)[0]

    alone = []
    for n in range(len(queries)):
        alone.append(attend(n))
        torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), torch.empty(len(queries), 1, 12, 512, device=device)
    with torch.cuda.graph(graph):
        torch.stack([attend(n) for n in range(len(queries))], out=kept)
    wrong = 0
    for _ in range(50):
        kept.zero_()
        graph.replay()
        wrong += int((kept != torch.stack(alone)).sum())
    torch.utils.deterministic.fill_uninitialized_memory = True
    return float(wrong)


def attend(requests: int, keys: int, heads: int, window: int, is_dry: bool) -> Problem:
    """Decode as it is timed, and checked on odd lengths and side by side too."""
    problem, last = attention(requests, keys, heads, window, is_dry), {}

    def launch(tiles: Tiles, turn: int) -> Any:
        last.update(tiles=tiles)
        return problem.launch((tiles, None, True), turn)

    def error(results: Any) -> float:
        found = max(problem.error(results), ragged(last["tiles"], heads, device_of(is_dry)))
        return found if is_dry or heads * window > 32 else found + overlapping(last["tiles"], "cuda")

    return replace(problem, launch=launch, error=error)


def attention_of_a_step(keys: int, is_dry: bool) -> Problem:
    """As a step has it: query and key of a token, attention, values. A setting: tiles, `IS_DEPENDENT` of both ends.

    The token's row is NaN until it is written: who reads it too early is found.
    """
    device, heads, pages = device_of(is_dry), 12, 4 if is_dry else keys // 64
    keys = pages * 64 - 32
    arena = torch.randn(pages + 1, 64, 3, 576, device=device, dtype=torch.bfloat16)
    kv, table = arena[:, :, 1], torch.randperm(pages, device=device).view(1, pages) + 1
    q, row, gate = (torch.randn(1, *n, device=device).bfloat16() for n in ((heads, 192), (576,), (heads * 128,)))
    gain, kv_b = torch.ones(512, device=device).bfloat16(), torch.randn(heads, 256, 512, device=device).mul_(0.05)
    kv_b, lengths, places = kv_b.bfloat16(), torch.tensor([keys], device=device), (table[:, -1], table[:, -1] * 0 + 31)
    page, last = int(table[0, -1]), {"setting": (NOW, False)}

    def launch(setting: tuple[Tiles, bool], turn: int) -> Tensor:
        last.update(setting=setting)
        tiles, is_dependent = setting
        with mock.patch.object(fast_absorb, "IS_DEPENDENT", is_dependent), torch.no_grad():
            query = fast_absorb.enter(q, row, gain, 1e-5, kv_b, kv, places)
            out = split_decode.attend_absorbed(query, kv, table, lengths, tiles=tiles, **OPTIONS)[0]
            return fast_absorb.leave(out, kv_b, 128, gate, torch.bfloat16)

    def exact() -> Tensor:
        own = kv[table[0]].double()
        place = torch.tensor([pages - 1], device=device), places[1]
        query = absorb.enter(q.double(), row.double(), gain.double(), 1e-5, kv_b.double(), own, place)
        order = torch.arange(pages, device=device).view(1, pages)
        out = reference.attend_absorbed(query, own, order, lengths, **OPTIONS)[0]
        return absorb.leave(out, kv_b.double(), 128, gate.double(), torch.float64)

    def error(result: Tensor) -> float:
        found = gap(result, exact())
        if is_dry:
            return found
        torch.utils.deterministic.fill_uninitialized_memory = False
        graph, kept = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for _ in range(8):
                kv[page, 31].fill_(torch.nan)
                kept.append(launch(last["setting"], 0))
        for _ in range(20):
            graph.replay()
            found += float(not all(torch.equal(one, result) for one in kept))
        torch.utils.deterministic.fill_uninitialized_memory = True
        return found

    return Problem(launch, error, keys * 576 * 2, turns=1 if is_dry else 4)


def few_tiles(count: int, is_dry: bool) -> Problem:
    """`count` tiles a split, from memory: what is left at 0 tiles is what a call costs beside its keys.

    A setting: tiles, whether the merge follows.
    """
    turns, pages = 1 if is_dry else max(4, 16 // count), (2 if is_dry else SPLITS) * count
    device = device_of(is_dry)
    kv = torch.randn(turns * pages + 1, 64, 576, device=device, dtype=torch.bfloat16)
    tables = torch.randperm(turns * pages, device=device).view(turns, 1, pages) + 1
    q, lengths = torch.randn(1, 12, 576, device=device).bfloat16(), torch.tensor([pages * 64], device=device)
    last: dict[str, Any] = {}

    def parts_alone(parts: Tensor, sums: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return parts[:, 0], sums[:, 0]

    def launch(setting: tuple[Tiles, bool], turn: int) -> tuple[Tensor, Tensor]:
        tiles, merges = setting
        last.update(merges=merges)
        with mock.patch.object(split_decode, "_merge", split_decode._merge if merges else parts_alone):
            splits = pages // count
            return split_decode.attend_absorbed(q, kv, tables[turn], lengths, splits=splits, tiles=tiles, **OPTIONS)

    def error(results: tuple[Tensor, Tensor]) -> float:
        exact = reference.attend_absorbed(q.double(), kv.double(), tables[0], lengths, **OPTIONS)
        return gap(results[0], exact[0]) if last["merges"] else 0.0

    return Problem(launch, error, pages * 64 * 576 * 2, turns=turns)


def merge(is_dry: bool) -> Problem:
    """The merge of 128 splits alone. A setting: values of a program, its warps."""
    device, turns = device_of(is_dry), 1 if is_dry else SMALL
    parts, sums = torch.randn(1, SPLITS, 12, 512, device=device), torch.randn(1, SPLITS, 12, device=device)
    exact = (torch.softmax(sums.double(), 1)[..., None] * parts.double()).sum(1)

    def launch(setting: tuple[int, int], turn: int) -> Tensor:
        with mock.patch.multiple(split_decode, MERGE_VALUES=setting[0], MERGE_WARPS=setting[1]):
            return split_decode._merge(parts, sums, not is_dry, opens=False)[0]

    return Problem(launch, lambda out: gap(out, exact), 4.0 * parts.numel(), turns=turns)


MERGES = [(8192, 8), (4096, 4), (8192, 4), (16384, 8), (4096, 8), (16384, 16), (2048, 4)]
STEPS = [(BOTH, True), (NOW, False), (NOW, True), (BOTH, False), (replace(NOW, opens=True), True)]
FEW = [(NOW, True), (NOW, False), (BOTH, True)]
CASES = [
    Case("mla 1 x 131072, 12 heads", partial(attend, 1, 131072, 12, 1), FORMS, 6e-3),
    Case("enter, mla 1 x 131072, leave", partial(attention_of_a_step, 131072), STEPS, 2e-2),
    Case("mla 32 x 8192, 12 heads", partial(attend, 32, 8192, 12, 1), FORMS[:6], 6e-3),
    Case("mla 1 x 8192, 1 tile a split", partial(few_tiles, 1), FEW, 6e-3),
    Case("mla 1 x 32768, 4 tiles a split", partial(few_tiles, 4), FEW, 6e-3),
    Case("merge of 128 splits", merge, MERGES, 1e-5),
    Case("mla 1 x 131072, 96 heads", partial(attend, 1, 131072, 96, 1), WIDES, 6e-3),
    Case("mla 32 x 8192, 12 heads, window 8", partial(attend, 32, 8192, 12, 8), WIDES, 6e-3),
    Case("mla 1 x 16384, 2 tiles a split", partial(few_tiles, 2), FEW, 6e-3),
    Case("mla 1 x 1048576, 12 heads", partial(attend, 1, 1048576, 12, 1), FORMS[:3], 6e-3),
]


def compile_all() -> None:
    from scripts.gpu import compile_long

    for tiles in dict.fromkeys([*FORMS, *WIDES]):
        print(tiles, compile_long.latent(tiles), flush=True)
    for line in compile_long.ends():
        print(line, flush=True)


if __name__ == "__main__":
    if "--dry" in sys.argv and not os.environ.get("TRITON_INTERPRET"):
        compile_all()
    else:
        lab_mla.main(settings="scripts.gpu.lab_long")
