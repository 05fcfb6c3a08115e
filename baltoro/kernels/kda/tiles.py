"""Tiles and warps of the KDA decode, verify and fold kernels: the only place where they are chosen.

Decode and fold must share `part` (it fixes the order of sums over K) and hold four values of a part in a thread, that
is rows x part >= 128 x warps; rows and warps are free otherwise. See `triton_token`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# programs up to which a launch counts as small: about one to a multiprocessor, so that latency is all
SMALL = 160
# keys of a part. 64: four shuffles for two rows where one part of 128 takes ten, and 24 registers for q, k and decay
# where parts of 32 take 48
PART = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """How one kernel cuts a head's state [BC, BC]."""

    part: int
    rows: int
    warps: int

    def constants(self, size: int) -> dict[str, Any]:
        """Constants and options of a launch. No choice of the compiler's which product and sum become one."""
        shape = {"BC": size, "PART": self.part, "ROWS": self.rows}
        return {**shape, "num_warps": self.warps, "enable_fp_fusion": False}


def decode(size: int, programs: int) -> Tile:
    """size: the power of two for K and V; programs: heads x requests.

    Few: the whole state in registers of 16 warps, one wait for memory. Many: chunks of 32 rows under way one ahead, in
    programs of four warps of which several share a multiprocessor, so that one loads while another stores.
    """
    part = min(PART, size)
    if programs <= SMALL:
        return Tile(part, size, warps(size, size, 32, 16))
    return Tile(part, min(32, size), warps(min(32, size), size, 32, 4))


def fold(size: int) -> Tile:
    """Rows of V never meet: small programs, 32 state values to a thread."""
    rows = min(32, size)
    return Tile(min(PART, size), rows, warps(rows, size, 32, 4))


@dataclass(frozen=True, slots=True)
class VerifyTile:
    """Rows of V in one product of the window with the state, and warps."""

    rows: int
    warps: int


def verify(size: int) -> VerifyTile:
    """Chunks of 64 rows: a program's state needs not be in registers at once, so three programs share a
    multiprocessor and 384 of them run at the same time."""
    return VerifyTile(min(64, max(16, size)), 8 if size >= 128 else 4 if size >= 64 else 1)


def warps(rows: int, size: int, values: int, most: int) -> int:
    """Warps for `values` of [rows, size] in a thread: a power of two up to `most`."""
    return max(1, min(most, rows * size // (32 * values)))


def power_of_two(size: int) -> int:
    """The least one that is not below."""
    return 1 << (size - 1).bit_length()
