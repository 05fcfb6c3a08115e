"""Tiles and warps of the KDA decode, verify and fold kernels: the only place where they are chosen.

Decode and fold must share `part` (it fixes the order of sums over K) and hold four values of a part in a thread, that
is rows x part >= 128 x warps, or have one tile; rows and warps are free otherwise. See `triton_token`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# programs up to which a launch counts as small: one to a multiprocessor of an H200, so that latency is all
SMALL = 132
# keys of a part. Measured on an H200 (2026-11-30, us, parts of 32 / 64): decode 256 x 96 heads 1093 / 1113, 1 x 12
# 5.0 / 5.4, 32 x 96 145 / 149, fold of eight tokens 165 / 175
PART = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """How decode or fold cuts a head's state [BC, BC]. registers: the most a thread may have; 0: as it compiles.
    ahead: how many programs further on is the one whose state a decode's fetches into the L2 cache; -1: none."""

    part: int
    rows: int
    warps: int
    registers: int = 0
    ahead: int = -1

    def shape(self, size: int) -> dict[str, Any]:
        """Constants and options of a fold. No choice of the compiler's which product and sum become one."""
        shape = {"BC": size, "PART": self.part, "ROWS": self.rows, "enable_fp_fusion": False}
        return shape | _options(self.warps, self.registers)

    def constants(self, size: int, *, can_be_ahead: bool = True) -> dict[str, Any]:
        """The same of a decode."""
        return self.shape(size) | {"AHEAD": self.ahead if can_be_ahead else -1}


@dataclass(frozen=True, slots=True)
class VerifyTile:
    """How verify cuts it: rows of V in one product; whether it fetches the state into the L2 cache at its start."""

    rows: int
    warps: int
    registers: int = 0
    is_ahead: bool = True

    def constants(self, size: int, *, can_be_ahead: bool = True) -> dict[str, Any]:
        """Constants and options of a launch."""
        shape = {"BC": size, "ROWS": self.rows, "AHEAD": 1 + self.is_ahead if can_be_ahead else 0}
        return shape | _options(self.warps, self.registers)


@dataclass(frozen=True, slots=True)
class Direct:
    """How `gluon_fold` cuts a head's state: rows of a program, warps."""

    rows: int
    warps: int

    def options(self) -> dict[str, Any]:
        """Constants and options of a launch."""
        return {"ROWS": self.rows, "WARPS": self.warps, "num_warps": self.warps, "enable_fp_fusion": False}


# On Hopper, heads of 128. One / eight tokens of 8 layers x 32 x 12 heads: 117 / 124 us (1.22 / 1.21 x floor); 64 rows
# of 4 or 8 warps, 16 of 2 alike. In Triton 130 / 165; with states and records copied into shared memory by programs
# that go through many tiles 129 / 147; with two or four tiles a program 119 / 126 and 120 / 138.
DIRECT = Direct(32, 4)


def dependent_launch(can_be: bool) -> dict[str, bool]:
    """Constants and options of a launch before what it waits for has ended: decode of one request x 12 heads 4.7 us
    instead of 5.3, verify of 32 x 12 15.7 instead of 16.0. Where programs queue up it gains nothing: decode of 32 x 12
    18.9 (18.5)."""
    return {"PDL": True, "launch_pdl": True} if can_be else {}


def decode(size: int, programs: int) -> Tile:
    """size: the power of two for K and V; programs: heads x requests.

    Few programs: the whole state in registers of 16 warps, one wait for memory. Many: small ones share a processor, and
    the waits of one are filled by others. 256 x 96 heads: one of 16 warps 1078 us (1.42 x floor); 32 rows, at most 128
    registers so that four fit, 933; 64 rows without a limit 872 (1.15 x). Fetching the states of later programs ahead,
    or copying them into shared memory while others are computed (949 at best), is slower.
    """
    if size < 128:
        return Tile(min(PART, size), min(32, size), warps(min(32, size), size, 32))
    return Tile(PART, 128, 16, 0, 0) if programs <= SMALL else Tile(PART, 64, 4)


def fold(size: int) -> Tile:
    """In Triton, where `DIRECT` is not for. Rows of V never meet: programs of half a head."""
    if size >= 128:
        return Tile(PART, 64, 4, 128)
    rows = min(32, size)
    return Tile(min(PART, size), rows, warps(rows, size, 32))


def verify(size: int, programs: int) -> VerifyTile:
    """size: at least 16. 32 requests x 12 heads: 15.8 us with what registers the compiler takes, 16.5 at 168."""
    if size < 128:
        return VerifyTile(min(64, size), 4 if size == 64 else 1)
    return VerifyTile(128, 4, 168) if programs <= SMALL else VerifyTile(64, 4)


def warps(rows: int, size: int, values: int) -> int:
    """Warps for `values` of [rows, size] in a thread: a power of two up to 4."""
    return max(1, min(4, rows * size // (32 * values)))


def power_of_two(size: int) -> int:
    """The least one that is not below."""
    return 1 << (size - 1).bit_length()


def _options(warps: int, registers: int) -> dict[str, Any]:
    return {"num_warps": warps} | ({"maxnreg": registers} if registers else {})
