"""Packed variable-length spans: how many requests' tokens lie in one [T, ...] tensor.

A span is consecutive tokens of one request. `lengths[n]` tokens of span n start at row `offsets[n]`; its first token
has absolute position `starts[n]`. Host integers (a Python tuple) let the plain-torch kernels slice without asking
the device; `offsets_device` is the same as a tensor for kernels that run there. What a kernel derives from spans alone
(row maps, masks) is made `once` and serves all layers; `to` takes it along, so that a trainer can make it ahead.
Invariants: offsets has N + 1 entries, begins with 0, ends with T; no span is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.copies import to_device

CPU = torch.device("cpu")
T = TypeVar("T")

# points inside spans, as (span, length): after the first `length` tokens of that span, 0 < length < its own length
Borders = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Spans:
    """N spans of T tokens in all. Not slotted, for the cached host values."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    device: torch.device = CPU
    _made: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)  # single writer: `once`

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

    def once(self, key: Hashable, make: Callable[[Spans], T]) -> T:
        """What `make` derives from these spans, on their device: tensors and plain values, in tuples. Made once."""
        if key not in self._made:
            self._made[key] = make(self)
        found: T = self._made[key]
        return found

    def to(self, device: torch.device) -> Spans:
        """The same spans on `device`, with all that was made of them; copies do not wait."""
        if device == self.device:
            return self
        made = {key: map_tensors(lambda t: t.to(device, non_blocking=True), value) for key, value in self._made.items()}
        return Spans(self.lengths, self.starts, device, made)

    def pinned(self) -> Spans:
        """The same spans with all that was made of them in memory that a device copies from without waiting."""
        return Spans(self.lengths, self.starts, self.device, map_tensors(torch.Tensor.pin_memory, self._made))

    @cached_property
    def offsets_host(self) -> Tensor:
        """int64 [N + 1] in the host's memory, whatever the device."""
        return torch.tensor(self.offsets)

    @property
    def offsets_device(self) -> Tensor:
        """int32 [N + 1] on `device`."""
        return self.once("offsets", lambda spans: to_device(spans.offsets_host.to(torch.int32), spans.device))

    @property
    def offsets_wide(self) -> Tensor:
        """int64 [N + 1] on `device`."""
        return self.once("wide offsets", lambda spans: to_device(spans.offsets_host, spans.device))

    @property
    def positions(self) -> Tensor:
        """int64 [T], absolute positions, on `device`."""
        return self.once("positions", _positions)

    def check_borders(self, borders: Borders) -> None:
        """Errors: ShapeError if one does not lie inside its span."""
        for n, length in borders:
            if not 0 <= n < len(self) or not 0 < length < self.lengths[n]:
                raise ShapeError(f"no point ({n}, {length}) inside spans of {self.lengths} tokens")

    def select(self, first: int, last: int) -> Spans:
        """Spans first..last-1 on their own."""
        return Spans(self.lengths[first:last], self.starts[first:last], self.device)


def _positions(spans: Spans) -> Tensor:
    shifts = np.asarray(spans.starts, np.int64) - np.asarray(spans.offsets[:-1], np.int64)
    rows = np.arange(spans.num_tokens) + np.repeat(shifts, np.asarray(spans.lengths, np.int64))
    return to_device(torch.from_numpy(rows), spans.device)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor in its tuples, lists and dicts changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(change, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [map_tensors(change, item) for item in value]
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    return value
