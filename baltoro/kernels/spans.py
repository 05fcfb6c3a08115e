"""Packed variable-length spans: how many requests' tokens lie in one [T, ...] tensor.

A span is consecutive tokens of one request. `lengths[n]` tokens of span n start at row `offsets[n]`; its first token
has absolute position `starts[n]`. Host integers (a Python tuple) let the plain-torch kernels slice without asking
the device; `offsets_device` is the same as a tensor for kernels that run there.
Invariants: offsets has N + 1 entries, begins with 0, ends with T; no span is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from baltoro.errors import ShapeError

CPU = torch.device("cpu")

# points inside spans, as (span, length): after the first `length` tokens of that span, 0 < length < its own length
Borders = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Spans:
    """N spans of T tokens in all. Not slotted, for the cached device tensors."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    device: torch.device = CPU

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.starts):
            raise ShapeError(f"{len(self.lengths)} span lengths but {len(self.starts)} starts")
        if any(n < 1 for n in self.lengths) or any(s < 0 for s in self.starts):
            raise ShapeError(f"spans need a positive length and a start >= 0: {self.lengths} at {self.starts}")

    @staticmethod
    def build(lengths: Sequence[int], starts: Sequence[int] | None = None, device: str | torch.device = "cpu") -> Spans:
        """Spans from lengths and, if they do not begin at 0, absolute starts."""
        lengths = tuple(lengths)
        return Spans(lengths, tuple(starts) if starts is not None else (0,) * len(lengths), torch.device(device))

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """N + 1 row offsets."""
        return (0, *accumulate(self.lengths))

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.offsets[-1]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Absolute position after each span: also how many keys its last token sees."""
        return tuple(s + n for s, n in zip(self.starts, self.lengths, strict=True))

    @cached_property
    def offsets_device(self) -> Tensor:
        """int32 [N + 1] on `device`."""
        return torch.tensor(self.offsets, dtype=torch.int32, device=self.device)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [T], absolute positions, on `device`."""
        parts = [torch.arange(s, e) for s, e in zip(self.starts, self.ends, strict=True)]
        return torch.cat(parts).to(self.device) if parts else torch.zeros(0, dtype=torch.int64, device=self.device)

    def check_borders(self, borders: Borders) -> None:
        """Errors: ShapeError if one does not lie inside its span."""
        for n, length in borders:
            if not 0 <= n < len(self) or not 0 < length < self.lengths[n]:
                raise ShapeError(f"no point ({n}, {length}) inside spans of {self.lengths} tokens")

    def select(self, first: int, last: int) -> Spans:
        """Spans first..last-1 on their own."""
        return Spans(self.lengths[first:last], self.starts[first:last], self.device)
