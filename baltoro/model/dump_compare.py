"""Two dumps held against each other, tensor by tensor: how far apart, how far is permitted, and where it begins.

In: two Views with the same prompt, limits, and where there is one a third View, of the first run made again otherwise
(other threads, another order of sums). Out: a `Report`: one `Row` a tensor, in the order of the run.
Differences: relative L2 |a - b| / |a|, cosine, largest |a - b|, all in float64. The floor of a tensor is what two runs
that ought to be the same differ by, never less than one rounding of its dtype.
Invariants: a report is good only if something was compared: names that only one side has, NaN or infinity, other
shapes, no elements, and nothing but zeros are failures.
Source: spec/training.md A.8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from baltoro.errors import ConfigError
from baltoro.model.dump import GRAD
from baltoro.model.dump_layout import View

Verdict = Literal["equal", "within", "above", "not finite", "shape", "empty", "only in A", "only in B", "ignored"]
GOOD: frozenset[Verdict] = frozenset({"equal", "within", "ignored"})
# floors that are permitted where nobody says how many, by what the second run did otherwise; None: a third dump
DEFAULT_TIMES = {"order": 10.0, "rounding": 3.0, None: 10.0}
VACUOUS = 0.5  # a limit from here on hides even a tensor that is half wrong


@dataclass(frozen=True, slots=True)
class Limits:
    """What is permitted: a relative L2 of `rtol`, and of `times` floors; both where both are given.

    Without either: `DEFAULT_TIMES` floors where one is known, else equality.
    """

    rtol: float | None = None
    times: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("times", self.times)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value}; it must be a number that is not negative")

    def limit(self, floor: float | None, default_times: float) -> float:
        """Largest relative L2 for a tensor. Errors: ConfigError if floors are asked for and unknown."""
        if self.times is not None and floor is None:
            raise ConfigError("there is no noise floor to multiply: dump A with --measure-floor, or give --floor C")
        times = default_times if self.times is None and self.rtol is None else self.times
        found = [] if self.rtol is None else [self.rtol]
        if times is not None and floor is not None:
            found.append(times * floor)
        return min(found, default=0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor. Numbers are None where nothing could be compared."""

    name: str
    verdict: Verdict
    shape: tuple[int, ...] = ()
    relative_l2: float | None = None
    cosine: float | None = None
    max_abs: float | None = None
    floor: float | None = None
    limit: float | None = None
    is_zero: bool = False

    @property
    def is_good(self) -> bool:
        return self.verdict in GOOD


@dataclass(frozen=True, slots=True)
class Report:
    """Rows in the order of the run; `complaints` are about the comparison as a whole."""

    rows: tuple[Row, ...]
    complaints: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        return not self.complaints and all(row.is_good for row in self.rows)

    @property
    def first(self) -> Row | None:
        """Where it begins."""
        return next((row for row in self.rows if not row.is_good), None)

    @property
    def num_vacuous(self) -> int:
        """Tensors whose limit is so wide that passing says little."""
        return sum(row.limit is not None and row.limit >= VACUOUS for row in self.rows)

    @property
    def num_compared(self) -> int:
        return sum(row.verdict in ("equal", "within", "above", "not finite") for row in self.rows)


def compare(
    a: View, b: View, *, limits: Limits | None = None, floor: View | None = None, ignore: str | None = None
) -> Report:
    """Errors: ConfigError if the runs had different prompts, or `ignore` is no regular expression."""
    limits = limits or Limits()
    for other, word in ((b, "B"), (floor, "the floor's run")):
        if other is not None and other.manifest.ids != a.manifest.ids:
            raise ConfigError(f"A and {word} ran different prompts; dump both with the same --prompt or --ids")
    try:
        skipped = re.compile(ignore) if ignore is not None else None
    except re.error as error:
        raise ConfigError(f"--ignore {ignore!r} is no regular expression: {error}") from error
    rows = tuple(_rows(a, b, limits, floor, skipped))
    return Report(rows, tuple(_complaints(rows, a, b)))


def difference(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """(relative L2, cosine, largest absolute difference) of finite tensors of one shape; 0, 1, 0 for two zeros."""
    a, b = a.to(torch.float64), b.to(torch.float64)
    gap = a - b
    norm_a, norm_b, norm_gap = (float(torch.linalg.vector_norm(tensor)) for tensor in (a, b, gap))
    relative = 0.0 if norm_gap == 0 else (norm_gap / norm_a if norm_a else math.inf)
    if norm_a and norm_b:
        cosine = float(((a / norm_a) * (b / norm_b)).sum())
    else:
        cosine = 1.0 if norm_a == norm_b else 0.0
    return relative, cosine, float(gap.abs().max())


def _rows(a: View, b: View, limits: Limits, floor: View | None, skipped: re.Pattern[str] | None) -> Iterator[Row]:
    in_a, in_b = set(a.names), set(b.names)
    for name in _merged(a.names, b.names):
        if skipped is not None and skipped.search(name):
            yield Row(name, "ignored")
        elif name not in in_b:
            yield Row(name, "only in A")
        elif name not in in_a:
            yield Row(name, "only in B")
        else:
            yield _row(name, a, b, limits, floor)


def _row(name: str, a: View, b: View, limits: Limits, floor: View | None) -> Row:
    mine, other = a.read(name), b.read(name)
    shape = tuple(mine.shape)
    if mine.shape != other.shape:
        return Row(name, "shape", shape)
    if not mine.numel():
        return Row(name, "empty", shape)
    if not (bool(mine.isfinite().all()) and bool(other.isfinite().all())):
        return Row(name, "not finite", shape)
    noise = _floor(name, mine, a, b, floor)
    kind = None if floor is not None else a.manifest.floor_kind or b.manifest.floor_kind
    limit = limits.limit(noise, DEFAULT_TIMES[kind])
    relative, cosine, largest = difference(mine, other)
    verdict: Verdict = "equal" if largest == 0 else ("within" if relative <= limit else "above")
    is_zero = not bool(mine.any()) and not bool(other.any())
    return Row(name, verdict, shape, relative, cosine, largest, noise, limit, is_zero)


def _floor(name: str, mine: Tensor, a: View, b: View, third: View | None) -> float | None:
    """From the third run, else from what the dumps measured themselves."""
    found: list[float | None] = [a.floor(name), b.floor(name)]
    if third is not None:
        if not third.has(name):
            raise ConfigError(f"the run that gives the floor has no {name}; dump it as A was dumped")
        again = third.read(name)
        if again.shape != mine.shape or not bool(again.isfinite().all()):
            raise ConfigError(f"{name} of the run that gives the floor has another shape than A's, or is not finite")
        found = [difference(mine, again)[0]]
    known = [value for value in found if value is not None]
    return max(*known, a.rounding(name), b.rounding(name)) if known else None


def _merged(a: tuple[str, ...], b: tuple[str, ...]) -> list[str]:
    """A's names in order; what only B has stands behind the name that it follows there."""
    known = set(a)
    behind: dict[str | None, list[str]] = {}
    last: str | None = None
    for name in b:
        if name in known:
            last = name
        else:
            behind.setdefault(last, []).append(name)
    merged = list(behind.get(None, []))
    for name in a:
        merged += [name, *behind.get(name, [])]
    return merged


def _complaints(rows: tuple[Row, ...], a: View, b: View) -> Iterator[str]:
    measured = [row for row in rows if row.relative_l2 is not None]
    if not measured:
        yield "nothing was compared: an empty comparison proves nothing"
    for kind, is_kind in (("activation", False), ("gradient", True)):
        found = [row for row in measured if row.name.startswith(GRAD) == is_kind]
        if found and all(row.is_zero for row in found):
            yield f"every {kind} is zero on both sides: nothing reached them"
    if a.manifest.has_gradients != b.manifest.has_gradients:
        yield "only one of the dumps has gradients: dump both with --gradients, or use --ignore '^grad/'"
