"""When the programs of latent attention do what: 4 calls in a graph, 12 heads over one request of 131,072 keys.

    PYTHONPATH=/tmp/site2:. python3 -m scripts.gpu.timeline_long
    python -m scripts.gpu.timeline_long --dry                      (compiles for Hopper, runs nothing)

Copies the kernels with reads of the card's clock put between their lines. Prints, for a call in the middle,
microseconds since the last program of the call in front was at its end: the earliest, middle and latest program.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baltoro.kernels.mla import bulk_decode, split_decode, triton_decode
from baltoro.kernels.mla.split_decode import Tiles

NOW = Tiles(16, 64, 2, 4, bulk=True)
KEYS, CALLS, MARKS = 131072, 4, 8
IMPORT = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"
SPLIT_MARKS = (
    "starts", "has asked for its first tiles", "first tile is there", "9th of 16 is there", "last tile is there",
    "sums are made", "has stored",
)  # fmt: skip
MERGE_MARKS = ("starts", "splits have ended", "has stored")
SPLIT_LINES = [
    (IMPORT, IMPORT.replace("gdc_wait", "gdc_wait, globaltimer"), ""),
    ("lengths, out, lse, scale2,\n", "lengths, out, lse, scale2, stamps,\n", ""),
    ("    latents = gl.allocate", "    stamps += (gl.program_id(0) * splits + gl.program_id(1)) * 8\n", "0"),
    ("    row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, wide))\n", "", "1"),
    ("        keys_left = length", "", "2, i == 0"),
    ("        keys_left = length", "", "3, i == 8"),
    ("        keys_left = length", "", "4, i == count - 1"),
    ("    mass = gl.sum(total", "", "5"),
]
MERGE_LINES = [
    (IMPORT, IMPORT.replace("gdc_wait", "gdc_wait, globaltimer"), ""),
    ("parts, sums, out, lse, num_rows", "parts, sums, out, lse, stamps, num_rows", ""),
    ("    if PDL and OPENS:", "    stamps += (tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)) * 8\n", "0"),
    ("    request, row, block = tl.program_id(0)", "", "1"),
]  # fmt: skip


def marked(module: ModuleType, lines: list[tuple[str, str, str]], last: str, language: str) -> ModuleType:
    """A copy that writes the time: at each line (what is put in front of it, mark and condition) and at the end."""
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    begin = text.index("def bulk_split_kernel" if language == "gl" else "def merge_kernel")
    for line, more, mark in lines:
        if not mark:
            text = text.replace(line, more)
            continue
        at = text.index(line, begin)
        indent = " " * (len(line) - len(line.lstrip()))
        text = text[:at] + more + indent + stamp(language, *mark.split(", ")) + text[at:]
    text = f"{text}    {stamp(language, last)}"
    path = Path(tempfile.mkdtemp()) / f"marked_{module.__name__.split('.')[-1]}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found
    spec.loader.exec_module(found)
    return found


def stamp(language: str, mark: str, condition: str = "") -> str:
    return f"{language}.store(stamps + {mark}, globaltimer(){', ' + condition if condition else ''})\n"


class Stamped:
    """A kernel that is given the next call's memory for its marks."""

    def __init__(self, kernel: Any, place: int, programs: int) -> None:
        self.kernel, self.place, self.calls = kernel, place, 0
        self.stamps = torch.zeros(CALLS, programs, MARKS, dtype=torch.int64, device="cuda")

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            stamps, self.calls = self.stamps[self.calls % CALLS], self.calls + 1
            return self.kernel[grid](*args[: self.place], stamps, *args[self.place :], **options)

        return launch


def timeline(tiles: Tiles, kernels: tuple[Any, Any]) -> list[str]:
    """Of the third of four calls."""
    arena = torch.randn(KEYS // 64 + 1, 64, 3, 576, device="cuda", dtype=torch.bfloat16)
    kv, table = arena[:, :, 1], torch.randperm(KEYS // 64, device="cuda").view(1, -1) + 1
    q, lengths = torch.randn(1, 12, 576, device="cuda").bfloat16(), torch.tensor([KEYS - 32], device="cuda")
    split, merge = Stamped(kernels[0], 8, 128), Stamped(kernels[1], 4, 96)

    def launch() -> None:
        for _ in range(CALLS):
            split_decode.attend_absorbed(q, kv, table, lengths, latent=512, scale=0.07, tiles=tiles, splits=128)

    with (
        mock.patch.object(bulk_decode, "bulk_split_kernel", split),
        mock.patch.object(triton_decode, "merge_kernel", merge),
    ):
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(12):
        graph.replay()
        torch.cuda.synchronize()
        since = merge.stamps[1, :, 2].max()
        found.append(((split.stamps[2] - since).double().cpu(), (merge.stamps[2] - since).double().cpu()))
    splits, merges = (torch.stack(each[2:]).median(0).values / 1e3 for each in zip(*found, strict=True))
    return [str(tiles), *table_of("split", splits, SPLIT_MARKS), *table_of("merge", merges, MERGE_MARKS)]


def table_of(name: str, times: Tensor, marks: tuple[str, ...]) -> list[str]:
    lines = []
    for n, mark in enumerate(marks):
        one = times[:, n]
        lines.append(f"  {name} {mark:32} {one.min():8.2f} {one.median():8.2f} {one.max():8.2f} us")
    return lines


def main() -> None:
    """See above."""
    split = marked(bulk_decode, SPLIT_LINES, "6", "gl").bulk_split_kernel
    merge = marked(triton_decode, MERGE_LINES, "2", "tl").merge_kernel
    forms = [NOW, replace(NOW, ahead=2, opens=True), replace(NOW, ahead=2)]
    if "--dry" in sys.argv:
        from scripts.gpu import compile_long

        for tiles in forms:
            print(tiles, compile_long.latent(tiles, (split, merge)), flush=True)
        return
    for tiles in forms:
        try:
            print("\n".join(timeline(tiles, (split, merge))), flush=True)
        except Exception as error:  # noqa: BLE001
            print(f"{tiles} FAILED {type(error).__name__}: {str(error)[-300:]}", flush=True)


if __name__ == "__main__":
    main()
