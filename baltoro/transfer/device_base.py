"""The bytes of a base model, once on a GPU for all processes that use it: written once, mapped through CUDA IPC.

In: tensors as `Raw` (host bytes), a path, a device. Out: `DeviceBase`: tensors that are views of one allocation.
The engine owns the allocation, which nothing else shares, and leaves a notice at PATH: manifest, fingerprint, and the
ticket with which another process maps it. A process that maps it and ends takes nothing along; the owner outlives it.
Invariants: what was opened is what was written: at the opening every tensor's SHA-256 is compared, and the digest of
all with the one that the opener was told. CUDA has no read-only maps, so whoever works on it calls `check` now and
then: a fingerprint taken on the device, which every change of a single word changes, and any other but one in 2^64.
Limits: both processes on one machine and device, with the same CUDA_VISIBLE_DEVICES. An owner that frees while somebody
maps: undefined by CUDA, so openers `close` first.
Source: torch/multiprocessing/reductions.py (the ticket is what torch sends for a CUDA tensor).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from baltoro.errors import ConfigError, DigestMismatch, TransferError
from baltoro.transfer.manifest import Manifest, Raw, check, describe
from baltoro.transfer.tensors import views_on

# torch gives an allocation of at least 20 MiB, in multiples of 2 MiB, a segment of its own: what is mapped is the base.
LEAST_BYTES, UNIT_BYTES = 20 << 20, 2 << 20
CHUNK_WORDS = 1 << 20  # of a fingerprint at once: 8 MiB read, 16 MiB in between


class Ticket(msgspec.Struct, frozen=True):
    """What `torch.UntypedStorage._share_cuda_` gives and `_new_shared_cuda` takes, in their order."""

    device: int
    handle: bytes
    num_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    needs_event: bool


class Notice(msgspec.Struct, frozen=True):
    """The file at a base's path. mark: the fingerprint of all bytes when they were written."""

    manifest: Manifest
    mark: int
    ticket: Ticket


class Sharing(Protocol):
    """How one process lets another map its memory."""

    def share(self, whole: Tensor) -> Ticket:
        """The ticket to `whole`, uint8 [N], which owns its storage."""
        ...

    def open(self, ticket: Ticket) -> Tensor:
        """The same bytes in another process: uint8 [N]."""
        ...


class CudaIpc:
    """Through torch, which counts who maps what in a file of its own."""

    def share(self, whole: Tensor) -> Ticket:
        return Ticket(*whole.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]

    def open(self, ticket: Ticket) -> Tensor:
        """Errors: RuntimeError of torch, e.g. in the process that shared it."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        fields = tuple(getattr(ticket, name) for name in Ticket.__struct_fields__)
        storage = torch.UntypedStorage._new_shared_cuda(*fields)
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage, 0, (ticket.num_bytes,), (1,))


class DeviceBase:
    """A base on a device. Single writer: nobody, by agreement."""

    def __init__(self, path: Path, manifest: Manifest, whole: Tensor, mark: int) -> None:
        self.path, self.manifest, self.mark = path, manifest, mark
        self._whole: Tensor | None = whole

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def content(self) -> Tensor:
        """All bytes and what pads the allocation: uint8. Errors: ConfigError after `close`."""
        if self._whole is None:
            raise ConfigError(f"the base of {self.path} was closed")
        return self._whole

    def views(self) -> dict[str, Tensor]:
        """Name -> tensor; nothing is copied."""
        return views_on(self.manifest, self.content)

    def check(self) -> None:
        """Take the fingerprint again: one read of the bytes, on the device. Errors: DigestMismatch."""
        found = fingerprint(self.content)
        if found != self.mark:
            raise DigestMismatch(f"the base of {self.path} was written to: fingerprint {found:x}, not {self.mark:x}")

    def verify(self) -> None:
        """Compare every tensor with its SHA-256, by way of the host. Errors: DigestMismatch names some that differ."""
        wrong = [
            entry.name
            for entry in self.manifest.tensors
            if hashlib.sha256(self.content[entry.offset : entry.end].cpu().numpy().data).hexdigest() != entry.sha256
        ]
        if wrong:
            raise DigestMismatch(f"the base of {self.path} is not what was written: {', '.join(wrong[:3])}")

    def remove(self) -> None:
        """Take the notice away, as the owner."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go. The memory goes when the last view of it does."""
        self._whole = None


def write_device_base(
    path: str | Path, tensors: Mapping[str, Raw], device: str | torch.device, sharing: Sharing | None = None
) -> DeviceBase:
    """Copy tensors to one allocation, and leave a notice. Errors: ConfigError where there is one already."""
    place = Path(path)
    if place.exists():
        raise ConfigError(f"{place} is there already; a base is written once: remove it, or choose another path")
    manifest = describe(0, tensors)
    check(manifest)
    size = max(LEAST_BYTES, -(-manifest.num_bytes // UNIT_BYTES) * UNIT_BYTES)
    whole = torch.zeros(size, dtype=torch.uint8, device=device)
    for name, view in views_on(manifest, whole).items():
        if view.numel():
            view.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(tensors[name].data), dtype=torch.uint8))
    mark = fingerprint(whole)
    notice = Notice(manifest, mark, (sharing or CudaIpc()).share(whole))
    with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.msgpack.encode(notice))
    return DeviceBase(place, manifest, whole, mark)


def open_device_base(path: str | Path, digest: str, sharing: Sharing | None = None) -> DeviceBase:
    """Map a base that has this digest (told by its owner), in another process than the owner's.

    Errors: ConfigError where there is none; DigestMismatch where it is another, or has changed.
    """
    place = Path(path)
    try:
        notice = msgspec.msgpack.decode(place.read_bytes(), type=Notice)
        check(notice.manifest)
    except (OSError, msgspec.MsgspecError, TransferError) as error:
        raise ConfigError(f"{place} is no base that can be opened: {error}") from error
    if notice.manifest.digest != digest:
        raise DigestMismatch(f"{place} has digest {notice.manifest.digest[:16]}; wanted {digest[:16]}")
    base = DeviceBase(place, notice.manifest, (sharing or CudaIpc()).open(notice.ticket), notice.mark)
    base.verify()
    base.check()
    return base


def fingerprint(whole: Tensor) -> int:
    """Sum over 64-bit words of word * (2 * place + 1), modulo 2^64: `whole` uint8 [8 n], anywhere.

    The factors are odd, so no change of one word keeps the sum; integers, so every order of summing gives the same.
    """
    words = whole.view(torch.int64)
    odd = torch.arange(1, 2 * min(CHUNK_WORDS, len(words)), 2, dtype=torch.int64, device=whole.device)
    total = torch.zeros((), dtype=torch.int64, device=whole.device)
    for first in range(0, len(words), CHUNK_WORDS):
        part = words[first : first + CHUNK_WORDS]
        total += (part * odd[: len(part)]).sum() + part.sum() * (2 * first)
    return int(total) % (1 << 64)
