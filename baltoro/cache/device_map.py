"""A stretch of a GPU's addresses whose memory can be given back and taken again: CUDA's virtual memory management.

In: a number of bytes, a device index. Out: `DeviceMap`: an address that never changes, with memory behind it or not.
Invariants: between `unmap` and `map` nobody may touch the address; giving back waits for the device first; what comes
back holds anything.
Limits: Linux; the memory is not torch's allocator's, and its figures do not count it.
Source: CUDA driver API, cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess, cuMemUnmap, cuMemRelease.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

PINNED, ON_DEVICE, READ_WRITE, MINIMUM = 1, 1, 3, 0  # CUmemAllocationType, CUmemLocationType, CUmemAccess_flags, ...


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp; what is left zero: no handle for others, no compression, no RDMA."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class DeviceMap:
    """See the module. Single writer: the arena that owns it. Errors of all: OSError or RuntimeError where the driver
    cannot."""

    def __init__(self, num_bytes: int, index: int) -> None:
        torch.cuda.synchronize(index)  # the driver's calls need a context
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._index = index
        self._properties = Properties(type=PINNED, location=Location(ON_DEVICE, index))
        unit = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), MINIMUM)
        self.num_bytes = -(-num_bytes // unit.value) * unit.value
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(self.num_bytes),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self.address = address.value
        self._handle: int | None = None

    def map(self) -> None:
        """Put memory behind the address."""
        if self._handle is not None:
            return
        handle = ctypes.c_uint64()
        size = ctypes.c_size_t(self.num_bytes)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
        place, none = ctypes.c_uint64(self.address), ctypes.c_size_t(0)
        self._call("cuMemMap", place, size, none, handle, ctypes.c_uint64(0))
        access = Access(Location(ON_DEVICE, self._index), READ_WRITE)
        self._call("cuMemSetAccess", place, size, ctypes.byref(access), ctypes.c_size_t(1))
        self._handle = handle.value

    def unmap(self) -> None:
        """Give the memory back; the address stays ours."""
        if self._handle is None:
            return
        torch.cuda.synchronize(self._index)
        self._call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.num_bytes))
        self._call("cuMemRelease", ctypes.c_uint64(self._handle))
        self._handle = None

    def tensor(self) -> torch.Tensor:
        """uint8 [num_bytes] over the address; it does not own it: keep this object as long."""
        made = torch.as_tensor(_Interface(self.address, self.num_bytes), device=f"cuda:{self._index}")
        if made.data_ptr() != self.address:
            raise RuntimeError("torch copied what it should have wrapped")
        return made

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with CUDA error {code}")


class _Interface:
    """`__cuda_array_interface__` of bytes at an address."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
