"""The bytes of a base model, once in memory for all processes of a machine that use it: written once, mapped read-only.

In: tensors as `Raw`, a path (in /dev/shm, or a file). Out: `SharedBase`: name -> read-only bytes.
Two files: PATH holds the bytes, PATH.json the manifest. The engine writes and owns them (`remove`), and outlives the
trainer, which opens them with the digest that the engine named.
Invariants: what was opened is what was written: every tensor's SHA-256 is compared at the opening, and the digest of
all with the one that the opener was told; nobody can write through a map; a file is whole or not there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from baltoro.errors import ConfigError, DigestMismatch, TransferError
from baltoro.transfer.manifest import Manifest, Raw, check, decode, describe, raws, verify


@dataclass(frozen=True, slots=True)
class Share:
    """Memory of one process that maps a file: `resident_bytes` counts pages whole, `proportional_bytes` by the number
    of processes that map them, so the sum of these over all processes is what is really there."""

    resident_bytes: int
    proportional_bytes: int


class SharedBase:
    """A mapped base. Single writer: nobody; `close` is the opener's."""

    def __init__(self, path: Path, manifest: Manifest, memory: mmap.mmap) -> None:
        self.path = path
        self.manifest = manifest
        self._memory = memory
        self._view = memoryview(memory)
        self.tensors: Mapping[str, Raw] = raws(manifest, self._view)

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def content(self) -> memoryview:
        """All bytes, read-only: `manifest` says where each tensor lies."""
        return self._view

    def check(self) -> None:
        """Nothing to do: nobody can write through a map. `verify` reads everything."""

    def verify(self) -> None:
        """Read everything again. Errors: DigestMismatch names the tensors that have changed."""
        try:
            verify(self.manifest, self._view)
        except TransferError as error:
            raise DigestMismatch(f"{self.path} is not what was written: {error}") from error

    def remove(self) -> None:
        """Take the names away, as the owner. Who has it mapped keeps it."""
        for path in (self.path, _manifest_path(self.path)):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap. Errors: BufferError while tensors are in use elsewhere."""
        for raw in self.tensors.values():
            raw.data.release()
        self.tensors = {}
        self._view.release()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_base(path: str | Path, tensors: Mapping[str, Raw]) -> SharedBase:
    """Write a base and map it. Errors: ConfigError where there is one already, or no room."""
    place = Path(path)
    if place.exists():
        raise ConfigError(f"{place} is there already; a base is written once: remove it, or choose another path")
    manifest = describe(0, tensors)
    check(manifest)
    started = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        with started.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # no room is an error now, not a SIGBUS later
                os.posix_fallocate(file.fileno(), 0, manifest.num_bytes)
            for entry in manifest.tensors:
                file.seek(entry.offset)
                file.write(tensors[entry.name].data)
        started.chmod(0o444)
        _manifest_path(place).write_bytes(manifest.encode())
        started.rename(place)
    except OSError as error:
        raise ConfigError(f"{place} cannot be written ({manifest.num_bytes:,} bytes): {error}") from error
    finally:
        started.unlink(missing_ok=True)
    return open_base(place, manifest.digest)


def open_base(path: str | Path, digest: str) -> SharedBase:
    """Map a base that has this digest (`SharedBase.digest`, told by its owner).

    Errors: ConfigError where there is none; DigestMismatch where it is another, or has changed.
    """
    place = Path(path)
    try:
        manifest = decode(_manifest_path(place).read_bytes())
        check(manifest)
        with place.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    except (OSError, ValueError, TransferError) as error:
        raise ConfigError(f"{place} is no base that can be opened: {error}") from error
    base = SharedBase(place, manifest, memory)
    try:
        if len(memory) != manifest.num_bytes or base.digest != digest:
            raise DigestMismatch(f"{place} has digest {base.digest[:16]}, {len(memory)} bytes; wanted {digest[:16]}")
        base.verify()
    except DigestMismatch:
        base.close()
        raise
    return base


def share_of(path: str | Path, process_id: int | None = None) -> Share:
    """What a process (this one by default) has of a file in memory, from /proc/PID/smaps.

    Errors: ConfigError where there is no such page.
    """
    smaps = Path(f"/proc/{process_id or 'self'}/smaps")
    if not smaps.exists():
        raise ConfigError(f"{smaps} does not exist: proportional memory can be read on Linux alone")
    counts = {"Rss:": 0, "Pss:": 0}
    is_ours = False
    for line in smaps.read_text().splitlines():
        first, *rest = line.split()
        if first in counts and is_ours:
            counts[first] += int(rest[0]) * 1024
        elif "-" in first and not first.endswith(":"):
            is_ours = line.endswith(str(Path(path).resolve()))
    return Share(counts["Rss:"], counts["Pss:"])


def _manifest_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")
