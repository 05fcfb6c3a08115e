"""How the Triton kernels of the KDA chunk form are launched: block sizes, warps, stages, and products by dtype.

All choices are here, so that a measured winner is set in one place. Needs triton only for the interpreter's flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# tokens whose decays stay within e^-40 .. e^40 of their middle where g >= -5
BOUNDED_GROUP = 16
# rows of a merged state
MERGE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Launch:
    """block: channels of the preparation, rows of the state elsewhere. registers: most a thread may have, None: any."""

    block: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """Of a launch."""
        found = {"num_warps": self.warps, "num_stages": self.stages}
        return found if self.registers is None else found | {"maxnreg": self.registers}


@dataclass(frozen=True, slots=True)
class Columns:
    """How `gluon_prepare` is launched. Three programs a multiprocessor have 168 registers a thread. heads_first: if
    programs side by side are the heads of a chunk, not the chunks of a head."""

    registers: int | None = 168
    heads_first: bool = True

    def options(self) -> dict[str, int]:
        """Of a launch."""
        found = {"num_warps": 4, "HEADS_FIRST": self.heads_first}
        return found if self.registers is None else found | {"maxnreg": self.registers}

    def grid(self, chunks: int, heads: int) -> tuple[int, int]:
        return (heads, chunks) if self.heads_first else (chunks, heads)


@dataclass(frozen=True, slots=True)
class Copies:
    """How `gluon_scan` is launched. is_early: whether U is made while the queries' product is under way."""

    is_early: bool = True


@dataclass(frozen=True, slots=True)
class Config:
    """One for each kernel that has a choice. is_direct: the serial part multiplies by the inverse: its chain is longer,
    and the preparation shorter. bounded: of `triton_bounded`, which prepares chunks of bounded gates where given."""

    prepare: Launch
    scan: Launch
    fragment: Launch
    is_direct: bool = False
    bounded: Launch | None = None
    # whether its inverse goes by blocks of 16 that a warp has, up to there; else all levels by whole products
    has_blocks: bool = True
    # of `gluon_prepare`, which does the same on Hopper for BF16 and heads of 128
    columns: Columns | None = None
    # of `gluon_scan`, which has the serial part under the same conditions
    copies: Copies | None = None

    def fit(self, *, keys: int, values: int) -> Config:
        """With blocks that a head of these sizes has."""
        small = min(keys, values)
        bounded = None if self.bounded is None else _fit(self.bounded, small)
        parts = _fit(self.prepare, small), _fit(self.scan, values), _fit(self.fragment, small)
        columns = self.columns if keys == values == 128 else None
        copies = self.copies if keys == values == 128 else None
        return Config(*parts, self.is_direct, bounded, self.has_blocks, columns, copies)

    def prepares_bounded(self, *, chunk: int, is_bounded: bool) -> Launch | None:
        """How, where it can: half a chunk at the bound must stay within what bf16 holds."""
        return self.bounded if is_bounded and chunk in BOUNDED_CHUNKS else None

    def prepares_columns(self, inputs: Sequence[Tensor], *, chunk: int, is_bounded: bool) -> Columns | None:
        """The same of `columns`; inputs q, k, v, g."""
        is_fit = is_bounded and chunk == 64 and not self.is_direct
        q, k, v, g = (x.dtype for x in inputs)
        is_fit &= q == k and q in (torch.bfloat16, torch.float32) and v == torch.bfloat16 and g == torch.float32
        return self.columns if is_fit else None


@dataclass(frozen=True, slots=True)
class Products:
    """Kinds of `triton_prepare.product`, by what is multiplied."""

    pairs: str
    inverse: str
    sums: str
    scan: str
    fragment: str
    merge: str


# Two programs a processor, which fill each other's waits. At 168 registers three would fit, but ptxas then waits after
# every single `wgmma`.
PREPARE = Launch(64, 4, 1)
# The same in half the steps, all channels at once. None: never.
BOUNDED: Launch | None = Launch(128, 4, 1)
BOUNDED_CHUNKS = (32, 64)
# Half a state's rows a program, the operands of three chunks under way: 590 us for 8192 tokens of 96 heads on an H200,
# 446 for 65536 of 12; with all rows to one (128, 8, 2), which reads operands once, 650 and 489.
SCAN = Launch(64, 4, 3)
# 294 us for 65536 tokens of 12 heads, the merge included; 404 with eight warps or 64 rows
FRAGMENT = Launch(128, 4, 2)
# On Hopper instead of BOUNDED, and of SCAN and FRAGMENT; None: never. Not measured yet.
COLUMNS: Columns | None = None
COPIES: Copies | None = None
# FP32 operands are twice as wide, and products are three: small blocks, so that every size fits into shared memory.
EXACT = Config(Launch(32, 4, 1), Launch(16, 4, 1), Launch(16, 4, 1))


def choose(dtype: torch.dtype, *, keys: int, values: int) -> Config:
    """Blocks fit keys and values."""
    if dtype == torch.float32:
        config = EXACT
    else:
        bounded = BOUNDED if min(keys, values) >= 64 else None
        config = Config(PREPARE, SCAN, FRAGMENT, bounded=bounded, columns=COLUMNS, copies=COPIES)
    return config.fit(keys=keys, values=values)


def products(dtype: torch.dtype) -> Products:
    """The interpreter computes garbage in bf16, so it gets FP32 throughout."""
    from triton import knobs

    if knobs.runtime.interpret:
        return Products(*["ieee"] * 6)
    if dtype == torch.float32:  # three TF32 products are as good as FP32 and stay on the matrix units
        return Products(*["tf32x3"] * 6)
    # bf16 factors of pairs, as the peers take them. FP16 has the mantissa of TF32 at twice its rate: entries of the
    # inverse are within -1 .. 1, and log-decays count by their absolute error, which is worst at e^-1: 1e-4.
    return Products(pairs="bf16", inverse="fp16", sums="fp16", scan="bf16", fragment="bf16", merge="tf32x3")


@lru_cache(maxsize=16)
def sum_matrices(chunk: int, group: int, kind: str, device: torch.device) -> Tensor:
    """Left factors [n, chunk, chunk] of sums over rows; row i of a matrix says which rows are summed.

    0: up to i, it included. 1: after i. 2: half of what is up to i less half of what is after it, within `group` rows.
    3 + l, of 2 h rows, h = group << l: from the middle up to i, where i is in their second half; else from i, it
    excluded, to the middle.
    """
    i, j = torch.arange(chunk)[:, None], torch.arange(chunk)[None, :]
    found = [(j <= i).float(), (j > i).float(), torch.where(j <= i, 0.5, -0.5) * (i // group == j // group)]
    half = group
    while half < chunk:
        middle = i // (2 * half) * (2 * half) + half
        second, first = (i >= middle) & (j >= middle) & (j <= i), (i < middle) & (j > i) & (j < middle)
        found.append((second | first).float())
        half *= 2
    return torch.stack(found).to(torch.float16 if kind == "fp16" else torch.float32).to(device)


@lru_cache(maxsize=16)
def bounded_matrices(chunk: int, kind: str, device: torch.device) -> Tensor:
    """Left factors [5 chunk, chunk] of the sums of `triton_bounded`; row i of a square says which rows are summed.

    After i. Up to i, it included. Half of what is up to i less half of what is after it, within i's half. And as one
    factor: the last one negative; for i in the first half what is after it there and half of the second half.
    """
    i, j = torch.arange(chunk)[:, None], torch.arange(chunk)[None, :]
    half = chunk // 2
    middle = torch.where(j <= i, 0.5, -0.5) * (i // half == j // half)
    across = torch.where(j < half, (j > i).float(), 0.5) * (i < half)
    found = [(j > i).float(), (j <= i).float(), middle, -middle, across]
    return torch.cat(found).to(torch.float16 if kind == "fp16" else torch.float32).to(device)


def _fit(launch: Launch, size: int) -> Launch:
    """With a block of at most `size`; one warp group at most for a small one."""
    block = min(launch.block, size)
    return Launch(
        block, launch.warps if block == launch.block else min(launch.warps, 4), launch.stages, launch.registers
    )
