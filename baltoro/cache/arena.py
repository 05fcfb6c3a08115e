"""Bytes that can be given back to the machine and taken again, at the same place: what an arena lies in.

In: a number of bytes and a device. Out: one uint8 tensor over them, whose views stay right whatever happens here.
On a CPU the bytes are an anonymous private map: giving back drops its pages, the addresses stay. On a GPU the storage
is emptied and filled again: every view is of that storage, so it stays right, but the address may be another one.
Invariants: giving back and taking are idempotent; between the two nobody may read or write; what comes back holds
anything (zeros on a CPU).
Limits: a captured GPU graph remembers addresses and would have to be captured again.
Source: madvise(2), MADV_DONTNEED.
"""

from __future__ import annotations

import mmap

import torch


class Arena:
    """Single writer of `is_given_back`: who calls `give_back` and `take`."""

    def __init__(self, num_bytes: int, device: str | torch.device) -> None:
        self.num_bytes = num_bytes
        self.is_given_back = False
        self._map: mmap.mmap | None = None
        if torch.device(device).type == "cpu" and num_bytes:
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        else:
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give_back(self) -> int:
        """Let the memory go. Out: how many bytes that is; 0 if it is gone already."""
        if self.is_given_back:
            return 0
        self.is_given_back = True
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
        else:
            self.bytes.untyped_storage().resize_(0)
            if self.bytes.device.type == "cuda":
                torch.cuda.empty_cache()
        return self.num_bytes

    def take(self) -> int:
        """Have the memory again, with anything in it. Out: how many bytes; 0 if it was there."""
        if not self.is_given_back:
            return 0
        if self._map is None:
            self.bytes.untyped_storage().resize_(self.num_bytes)
        self.is_given_back = False
        return self.num_bytes
