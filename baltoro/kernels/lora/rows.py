"""Which rows of a packed [T, ...] tensor belong to which adapter slot.

Slot 0 is no adapter. Host integers say which slots occur, so that nothing has to ask the device. Rows in fixed form
know nothing on the host: `shares` says it, on the device, and every slot's terms are computed for all rows
(`fixed.py`).
Invariants: groups are disjoint, ascend by slot, and leave out slot 0; `index` is their rows one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.copies import to_device


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of one step by adapter slot.

    slots    int64 [T] on the device, the slot of each row
    present  slots that occur, without 0, ascending
    groups   int64 row indices of each of them; None: that slot has all rows
    shares   fixed form: [T, U], float32, 1 where the row has the slot, else 0; None: the form above
    """

    slots: Tensor
    present: tuple[int, ...]
    groups: tuple[Tensor | None, ...]
    shares: Tensor | None = None

    @staticmethod
    def build(slots: Sequence[int], lengths: Sequence[int], device: str | torch.device = "cpu") -> AdapterRows | None:
        """From the slot of each span and its number of rows; None where no row has an adapter.

        Errors: ShapeError for a negative slot, or as many slots as there are not spans.
        """
        if len(slots) != len(lengths) or any(slot < 0 for slot in slots):
            raise ShapeError(f"adapter slots {tuple(slots)} for {len(lengths)} spans: one each, 0 for none")
        present = tuple(sorted({slot for slot, n in zip(slots, lengths, strict=True) if slot and n}))
        if not present:
            return None
        each = torch.tensor(slots).repeat_interleave(torch.tensor(lengths))  # on the host: nothing waits for a device
        device = torch.device(device)
        if len(present) == 1 and bool((each == present[0]).all()):
            return AdapterRows(to_device(each, device), present, (None,))
        groups = tuple(to_device((each == slot).nonzero().flatten(), device) for slot in present)
        return AdapterRows(to_device(each, device), present, groups)

    @staticmethod
    def fixed(slots: Tensor, num_slots: int) -> AdapterRows:
        """In fixed form, of slots int64 [T] on the device, 0 .. num_slots."""
        known = torch.arange(1, num_slots + 1, device=slots.device)
        return AdapterRows(slots, (), (), (slots.unsqueeze(1) == known).to(torch.float32))

    @property
    def slot_places(self) -> Tensor:
        """int64 [T]: the place of each row's slot among the factors; 0 also for rows without one, whose share is 0."""
        return (self.slots - 1).clamp_min(0)

    def among(self, wanted: Collection[int]) -> list[tuple[int, Tensor | None]]:
        """(slot, rows) of those of `wanted` that occur."""
        return [(s, rows) for s, rows in zip(self.present, self.groups, strict=True) if s in wanted]


def gather(x: Tensor, rows: Tensor | None) -> Tensor:
    """The rows of x; all of them for None."""
    return x if rows is None else x.index_select(0, rows)


def add_rows(out: Tensor, parts: Sequence[tuple[Tensor | None, Tensor]]) -> Tensor:
    """out [T, ...] plus terms in the accumulate dtype, each for its (disjoint) rows; summed there, rounded once.

    Rows without a term come back as they were. Out of place: autograd sees every step.
    """
    if not parts:
        return out
    wide = out.to(parts[0][1].dtype)
    if parts[0][0] is None:
        return (wide + parts[0][1]).to(out.dtype)
    index = torch.cat([rows for rows, _ in parts if rows is not None])
    return wide.index_add(0, index, torch.cat([term for _, term in parts])).to(out.dtype)
