"""How the Triton kernels of the KDA chunk form are launched: block sizes, warps, stages, and products by dtype.

All choices are here, so that a measured winner is set in one place. Needs triton only for the interpreter's flag.
"""

from __future__ import annotations

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
class Config:
    """One for each kernel that has a choice. is_direct: the serial part multiplies by the inverse: its chain is longer,
    and the preparation shorter."""

    prepare: Launch
    scan: Launch
    fragment: Launch
    is_direct: bool = False


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
# A program owns a processor: two buffers of 56 kB of operands, and the state in registers. Where heads and segments
# nearly fill the card all rows of a state go to one program, so operands are read once; else half of them.
SCAN_WHOLE, SCAN_HALF = Launch(128, 8, 2), Launch(64, 4, 3)
FRAGMENT = Launch(128, 8, 3)
# FP32 operands are twice as wide, and products are three: small blocks, so that every size fits into shared memory.
EXACT = Config(Launch(32, 4, 1), Launch(16, 4, 1), Launch(16, 4, 1))
# of the processors, filled by programs that own whole states
FILLED = 0.6


def choose(dtype: torch.dtype, *, keys: int, values: int, programs: int, num_units: int) -> Config:
    """Blocks fit keys and values. programs: states that run side by side, before any is cut into segments."""
    if dtype == torch.float32:
        config = EXACT
    else:
        # few states are cut into segments until the card is full
        is_filled = programs >= FILLED * num_units or programs * 8 <= num_units
        config = Config(PREPARE, SCAN_WHOLE if is_filled else SCAN_HALF, FRAGMENT)
    return Config(
        _fit(config.prepare, min(keys, values)),
        _fit(config.scan, values),
        _fit(config.fragment, min(keys, values)),
        config.is_direct,
    )


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


def _fit(launch: Launch, size: int) -> Launch:
    """With a block of at most `size`; one warp group at most for a small one."""
    block = min(launch.block, size)
    return Launch(
        block, launch.warps if block == launch.block else min(launch.warps, 4), launch.stages, launch.registers
    )
