"""Bytes that can be given back to the machine and taken again, at the same place: what an arena lies in.

In: a number of bytes and a device. Out: one uint8 tensor over them, whose views stay right whatever happens here.
On a CPU the bytes are an anonymous private map: giving back drops its pages, the addresses stay. On a GPU they lie in a
stretch of addresses that is ours with or without memory behind it (`device_map.py`), where the driver has such; else
the storage is emptied and filled again: every view is of it, so it stays right, but the address may be another one.
Invariants: giving back and taking are idempotent; between the two nobody may read or write; what comes back holds
anything (zeros on a CPU).
`keeps_address` says whether a captured graph, which remembers addresses, is right again afterwards.
Source: madvise(2), MADV_DONTNEED.
"""

from __future__ import annotations

import mmap

import torch

from baltoro.cache.device_map import DeviceMap


class Arena:
    """Single writer of `is_given_back`: who calls `give_back` and `take`."""

    def __init__(self, num_bytes: int, device: str | torch.device) -> None:
        self.num_bytes = num_bytes
        self.is_given_back = False
        self.keeps_address = True
        self._map: mmap.mmap | None = None
        self._device_map: DeviceMap | None = None
        if torch.device(device).type == "cpu" and num_bytes:
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            return
        found = _on_gpu(num_bytes, torch.device(device)) if torch.device(device).type == "cuda" and num_bytes else None
        if found is not None:
            self._device_map, self.bytes = found
        else:
            self.keeps_address = num_bytes == 0
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give_back(self) -> int:
        """Let the memory go. Out: how many bytes that is; 0 if it is gone already."""
        if self.is_given_back:
            return 0
        self.is_given_back = True
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
        elif self._device_map is not None:
            self._device_map.unmap()
        else:
            self.bytes.untyped_storage().resize_(0)
            if self.bytes.device.type == "cuda":
                torch.cuda.empty_cache()
        return self.num_bytes

    def take(self) -> int:
        """Have the memory again, with anything in it. Out: how many bytes; 0 if it was there."""
        if not self.is_given_back:
            return 0
        if self._device_map is not None:
            self._device_map.map()
        elif self._map is None:
            self.bytes.untyped_storage().resize_(self.num_bytes)
        self.is_given_back = False
        return self.num_bytes


def _on_gpu(num_bytes: int, device: torch.device) -> tuple[DeviceMap, torch.Tensor] | None:
    """Addresses with memory behind them, and a tensor over it; None where the driver has no such thing."""
    try:
        made = DeviceMap(num_bytes, torch.cuda.current_device() if device.index is None else device.index)
        made.map()
        return made, made.tensor()[:num_bytes]
    except (OSError, AttributeError, RuntimeError):
        return None
