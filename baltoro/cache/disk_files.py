"""Records as files of one directory: written whole or not at all, and believed only if every byte is right.

    <digest in hex>.prefix = header | digest | parent | block | state

The header holds a version, the fingerprint of what the bytes mean (model, layout, endpoint), the lengths, and a
blake2b-16 over the rest of the file. A file is written under another name, synced, then renamed; what a killed process
left under the other name is removed when the directory is opened.
In: records. Out: the same records, or None.
Invariants: a file that is short, long, altered, of another fingerprint or under a wrong name is removed and counted as
lost. Names without our suffix are left alone. One process has a directory at a time.
Single caller: the thread of `disk_thread.py`, after open.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from baltoro.cache.tier import TierEntry, TierRecord
from baltoro.errors import ConfigError
from baltoro.observe import log, logger

MAGIC = b"baltkv01"  # with the version of the format
SUFFIX = ".prefix"
UNFINISHED = ".unfinished"
NO_STATE = -1
# magic, fingerprint, depth, bytes of block, of state, of digest, of parent; then the checksum
HEADER = struct.Struct("<8s16sqqqHH")
SUM_BYTES = 16


class Files(Protocol):
    """Where records are kept. Errors of the operating system come out as OSError."""

    def scan(self) -> tuple[list[TierEntry], int]:
        """(what is there, least recently used first; how many bad files were removed)."""

    def write(self, record: TierRecord) -> None: ...

    def read(self, digest: bytes) -> TierRecord | None:
        """None if it is not there, or not right: then it is gone afterwards."""

    def remove(self, digest: bytes) -> None:
        """Harmless if it is not there."""

    def close(self) -> None: ...


def file_bytes(record: TierRecord) -> int:
    """Size of the file that holds `record`."""
    size = HEADER.size + SUM_BYTES + len(record.digest) + len(record.parent) + len(record.block)
    return size + len(record.state or b"")


@dataclass(frozen=True, slots=True)
class _Outline:
    """A header and the names after it."""

    fingerprint: bytes
    entry: TierEntry
    block_bytes: int
    state_bytes: int
    head: bytes
    checksum: bytes


class DiskFiles:
    """The files of one directory. Errors: ConfigError if another process has it, or it cannot be written to."""

    def __init__(self, directory: Path, fingerprint: bytes) -> None:
        self.directory = directory
        self.fingerprint = hashlib.blake2b(fingerprint, digest_size=16).digest()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ConfigError(f"another process has {directory}: give each worker a directory of its own") from error
        except OSError as error:
            raise ConfigError(f"the disk tier cannot use {directory}: {error}") from error

    def scan(self) -> tuple[list[TierEntry], int]:
        """Reads headers only; the bytes are checked when they are read."""
        found, num_bad = [], 0
        for path in self.directory.iterdir():
            if path.name.endswith(UNFINISHED):
                path.unlink()
            elif path.name.endswith(SUFFIX):
                outline = self._outline(path)
                if outline is None:
                    num_bad += 1
                else:
                    found.append((path.stat().st_mtime_ns, outline.entry))
        found.sort(key=lambda item: (item[0], item[1].digest))
        return [entry for _, entry in found], num_bad

    def write(self, record: TierRecord) -> None:
        path = self._path(record.digest)
        unfinished = path.with_suffix(UNFINISHED)
        state = record.state or b""
        state_bytes = NO_STATE if record.state is None else len(state)
        head = HEADER.pack(
            *(MAGIC, self.fingerprint, record.depth, len(record.block), state_bytes),
            *(len(record.digest), len(record.parent)),
        )
        head += record.digest + record.parent
        try:
            with unfinished.open("wb") as file:
                file.write(head[: HEADER.size] + _checksum(head, record.block, state) + head[HEADER.size :])
                file.write(record.block)
                file.write(state)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        self._sync_directory()

    def read(self, digest: bytes) -> TierRecord | None:
        path = self._path(digest)
        if not path.exists():
            return None
        record = self._read(path)
        if record is None or record.digest != digest:
            path.unlink(missing_ok=True)
            return None
        os.utime(path)  # the order of last use survives a restart
        return record

    def remove(self, digest: bytes) -> None:
        self._path(digest).unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.close()

    def _path(self, digest: bytes) -> Path:
        return self.directory / (digest.hex() + SUFFIX)

    def _sync_directory(self) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _outline(self, path: Path) -> _Outline | None:
        """What `path` says it is; None, and it is gone if it can be, if that cannot be true."""
        try:
            with path.open("rb") as file:
                outline = _read_outline(file, os.fstat(file.fileno()).st_size)
            if outline and outline.fingerprint == self.fingerprint and self._path(outline.entry.digest) == path:
                return outline
            path.unlink()
        except OSError as error:
            log(logger("cache"), "unreadable file", level=logging.WARNING, path=str(path), error=str(error))
        return None

    def _read(self, path: Path) -> TierRecord | None:
        with path.open("rb") as file:
            outline = _read_outline(file, os.fstat(file.fileno()).st_size)
            if outline is None or outline.fingerprint != self.fingerprint:
                return None
            block, state = file.read(outline.block_bytes), file.read(outline.state_bytes)
        if _checksum(outline.head, block, state) != outline.checksum:
            return None
        entry = outline.entry
        return TierRecord(entry.digest, entry.parent, entry.depth, block, state if entry.has_state else None)


def _checksum(head: bytes, block: bytes, state: bytes) -> bytes:
    total = hashlib.blake2b(head, digest_size=SUM_BYTES)
    total.update(block)
    total.update(state)
    return total.digest()


def _read_outline(file: BinaryIO, num_bytes: int) -> _Outline | None:
    """The beginning of a file of `num_bytes`, or None if it cannot be one of ours. Leaves `file` at the block."""
    start = file.read(HEADER.size + SUM_BYTES)
    if len(start) < HEADER.size + SUM_BYTES:
        return None
    magic, fingerprint, depth, block_bytes, state_bytes, digest_bytes, parent_bytes = HEADER.unpack_from(start)
    has_state = state_bytes != NO_STATE
    lengths = (block_bytes, state_bytes if has_state else 0, digest_bytes, parent_bytes)
    if magic != MAGIC or min(lengths) < 0 or len(start) + sum(lengths) != num_bytes:
        return None
    names = file.read(digest_bytes + parent_bytes)
    entry = TierEntry(names[:digest_bytes], names[digest_bytes:], depth, has_state, num_bytes)
    head = start[: HEADER.size] + names
    return _Outline(fingerprint, entry, block_bytes, lengths[1], head, start[HEADER.size :])
