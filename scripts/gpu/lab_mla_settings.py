"""What `lab_mla.py` tries: settings of each problem, most promising first, in the order of their worth."""

from __future__ import annotations

from functools import partial
from typing import Any

from baltoro.kernels.attnres import fast as attnres
from baltoro.kernels.linear import fast as linear
from baltoro.kernels.linear.stream import StreamTiles
from baltoro.kernels.mla.split_decode import Tiles
from scripts.gpu.lab_mla_cases import Case, attention, bank_pass, depth_mix, router, router_and_select, select

NARROW = [
    (Tiles(16, 64, 2, 4, bulk=True), None, True),
    (Tiles(16, 32, 3, 4, flip=True, per_unit=2), None, True),
    (Tiles(16, 64, 3, 4, flip=True), None, True),
    (Tiles(16, 32, 3, 4, per_unit=2), None, True),
    (Tiles(16, 64, 3, 8, flip=True), None, True),
    (Tiles(16, 64, 2, 4, flip=True, per_unit=2), None, True),
    (Tiles(16, 32, 3, 8, flip=True, per_unit=2), None, True),
    (Tiles(16, 32, 5, 4, flip=True), None, True),
    (Tiles(16, 32, 2, 4, flip=True, per_unit=3), None, True),
    (Tiles(16, 32, 3, 4, flip=True, per_unit=2), 132, True),
    (Tiles(16, 64, 2, 8, bulk=True), None, True),
    (Tiles(16, 64, 2, 4, bulk=True), None, False),
    (Tiles(16, 64, 2, 4), None, True),
]
WIDE = [
    (Tiles(64, 64, 2, 8, bulk=True), None, True),
    (Tiles(32, 64, 2, 8, bulk=True), None, True),
    (Tiles(64, 32, 4, 8, flip=True), None, True),
    (Tiles(64, 64, 2, 8, flip=True), None, True),
    (Tiles(32, 64, 2, 4), None, True),
    (Tiles(32, 64, 3, 8, flip=True), None, True),
    (Tiles(32, 32, 3, 4, per_unit=2), None, True),
    (Tiles(64, 32, 4, 8), None, True),
    (Tiles(16, 32, 3, 4, flip=True, per_unit=2), None, True),
]
ONE = [
    linear.Tiles(1, 2, 1024, 7, 4),
    linear.Tiles(1, 2, 8192, 1, 8),
    linear.Tiles(1, 1, 8192, 1, 4),
    linear.Tiles(1, 2, 8192, 1, 4),
    linear.Tiles(1, 4, 1024, 7, 4),
    linear.Tiles(1, 4, 8192, 1, 8),
    "torch.mm, bf16",
]
THIN = [
    linear.Tiles(8, 16, 256, 5, 2),
    linear.Tiles(8, 16, 256, 4, 1),
    linear.Tiles(8, 32, 256, 4, 4),
    linear.Tiles(16, 64, 256, 4, 4),
    linear.Tiles(16, 32, 256, 4, 2),
    StreamTiles(16, 64, 256, 4, 4),
    "torch.mm, bf16",
]
SIXTY = [
    StreamTiles(64, 128, 64, 7, 4),
    StreamTiles(64, 128, 128, 4, 4),
    StreamTiles(64, 128, 64, 4, 4, 2),
    "one product",
    "torch.mm, bf16",
    linear.Tiles(64, 64, 64, 5, 4),
    linear.Tiles(64, 32, 128, 4, 4),
]
MANY = [
    "one product",
    "torch.mm, bf16",
    "fp32 alone",
    "fp32 alone, turned",
    "fp32 alone, Lt",
    "fp32 alone, turned, Lt",
    StreamTiles(256, 128, 64, 4, 8),
    StreamTiles(128, 128, 64, 5, 8),
    StreamTiles(128, 256, 64, 4, 8),
    StreamTiles(128, 128, 64, 6, 4),
    StreamTiles(128, 128, 64, 3, 4, 2),
    linear.Tiles(64, 128, 64, 4, 4),
]
SHARED: list[dict[str, Any]] = [
    {"SHARE_BLOCK": 512},
    {"SHARE_BLOCK": 256},
    {"FEW_TOKENS": 0, "CHUNK": 1024, "READ_WARPS": 16},
    {"SHARE_BLOCK": 512, "SHARE_WARPS": 8},
    {"SHARE_BLOCK": 256, "SHARE_WARPS": 8},
    {"SHARE_BLOCK": 512, "dependent": False},
    {"SHARE_BLOCK": 1024, "SHARE_WARPS": 16},
    {"FEW_TOKENS": 0, "CHUNK": 512, "READ_WARPS": 16},
]
WHOLE: list[dict[str, Any]] = [
    {"FEW_TOKENS": 0, "CHUNK": chunk, "READ_WARPS": warps}
    for chunk, warps in ((256, 8), (256, 4), (512, 8), (1024, 16), (256, 16))
]
SELECT = [(128, 16), (128, 4), (256, 16)]
SCAN = [{"SCAN": attnres.Scan(**kinds)} for kinds in (
    {}, {"sum_block": 256}, {"sum_block": 128}, {"score_block": 64}, {"sum_block": 512, "sum_warps": 8},
    {"score_block": 64, "score_stages": 5}, {"tokens": 16, "score_warps": 8},
)]  # fmt: skip
CASES = [
    Case("mla 12 heads, 1 x 131072", partial(attention, 1, 131072, 12, 1), NARROW, 6e-3),
    Case("depth mix, 1 token", partial(depth_mix, 1), SHARED, 1e-2),
    Case("router 1 token", partial(router, 1), ONE, 5e-3),
    Case("top-16, 1 token", partial(select, 1), SELECT, 1e-5),
    Case("router + top-16, 1 token", partial(router_and_select, 1), ["product", "both"], 5e-3),
    Case("router 256 tokens", partial(router, 256), MANY, 5e-3),
    Case("mla 12 heads, 32 x 8192", partial(attention, 32, 8192, 12, 1), NARROW[:7], 6e-3),
    Case("bank pass, 8192 tokens", partial(bank_pass, 8192), SCAN, 1e-2),
    Case("depth mix, 32 tokens", partial(depth_mix, 32), [*SHARED[:3], WHOLE[0], WHOLE[3]], 1e-2),
    Case("router 64 tokens", partial(router, 64), SIXTY, 5e-3),
    Case("mla 12 heads, 32 x 8192, window 8", partial(attention, 32, 8192, 12, 8), WIDE, 6e-3),
    Case("mla 96 heads, 1 x 131072", partial(attention, 1, 131072, 96, 1), WIDE[:5], 6e-3),
    Case("router 8 tokens", partial(router, 8), THIN, 5e-3),
    Case("router 16 tokens", partial(router, 16), [t for t in THIN if isinstance(t, str) or t.rows > 8], 5e-3),
    Case("top-16, 256 tokens", partial(select, 256), SELECT, 1e-5),
    Case("depth mix, 8192 tokens", partial(depth_mix, 8192), WHOLE, 1e-2),
    Case("mla 12 heads, 1 x 1048576", partial(attention, 1, 1048576, 12, 1), NARROW[:2], 6e-3),
]
