"""One new version of some tensors, whole or not at all: prepare, buckets, verify, commit, resume.

    sender                              receiver
    Prepare(manifest)          ->       manifest is checked; room is made beside the version that serves
                               <-       Ready, or Refused
    Bucket, Bucket, ...        ->       copied to their place, in order
    Commit                     ->       all there? every digest right? pause; install; resume (in a finally)
                               <-       Committed, or Refused(check, why)

In: tensors as `Raw`. Out: `Receipt` at the sender, the installed `Manifest` at the receiver.
Invariants: the version that serves is not touched before every byte of the new one has been verified where it lies;
`Target.install` is the only moment of change; whatever goes wrong, either end dying included, the receiver raises
TransferError(check), the old version serves on, and is resumed; the sender learns the same check.
Checks: those of `manifest.check`, then transfer, order, length, count, digest, install, peer, timeout, aborted, and the
channel's own (forged).
Source: the consequences in docs/spec/training.md G.1, B.2 (7, 8, 9, 12, 13).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from baltoro.errors import TransferError
from baltoro.transfer.channel import Channel, Frame
from baltoro.transfer.manifest import Kind, Manifest, Raw, check, describe, verify
from baltoro.transfer.messages import (
    Abort,
    Bucket,
    Commit,
    Committed,
    Message,
    Prepare,
    Ready,
    Refused,
    decode,
    encode,
    put_message,
)

DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a transfer was."""

    manifest: Manifest
    num_buckets: int
    seconds: float


class Target(Protocol):
    """Where versions are installed: the adapters of an engine. Single writer: its `Receiver`."""

    @property
    def version(self) -> int:
        """The one that serves; -1 if there is none."""

    @property
    def expected(self) -> Mapping[str, Kind] | None:
        """Names, dtypes and shapes of a version; None accepts all."""

    def stage(self, manifest: Manifest) -> memoryview:
        """Writable memory for a new version, beside the one that serves. Becomes its own by `install`."""

    def pause(self) -> None:
        """Finish the step under way and start no other. Requests stay."""

    def install(self, manifest: Manifest, staged: memoryview) -> None:
        """Change versions. If it raises, the old one is still whole."""

    def resume(self) -> None:
        """Go on. May be called without `pause`, and twice."""


class HostCopy:
    """The simplest target: the bytes of the version that serves, in memory."""

    def __init__(self, expected: Mapping[str, Kind] | None = None) -> None:
        self.expected = expected
        self.manifest: Manifest | None = None
        self.content = memoryview(b"")
        self.is_paused = False

    @property
    def version(self) -> int:
        return self.manifest.version if self.manifest else -1

    def stage(self, manifest: Manifest) -> memoryview:
        return memoryview(bytearray(manifest.num_bytes))

    def pause(self) -> None:
        self.is_paused = True

    def install(self, manifest: Manifest, staged: memoryview) -> None:
        self.manifest, self.content = manifest, staged.toreadonly()

    def resume(self) -> None:
        self.is_paused = False


def send(
    channel: Channel, version: int, tensors: Mapping[str, Raw], *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Receipt:
    """Bring a version to the other end. `timeout_s` limits every single wait.

    Errors: TransferError with the check that refused it, here or there.
    """
    start = time.monotonic()
    manifest, transfer = describe(version, tensors), secrets.token_hex(8)
    put_message(channel, Prepare(transfer, manifest), timeout_s)
    _answer(channel, transfer, timeout_s)
    index = offset = 0
    is_done = False
    try:
        for pieces in buckets(manifest, tensors, channel.bucket_bytes):
            bucket = Bucket(transfer, index, offset, sum(piece.nbytes for piece in pieces))
            channel.put(encode(bucket), pieces, timeout_s=timeout_s)
            index, offset = index + 1, offset + bucket.num_bytes
        is_done = True
    finally:
        if not is_done and channel.is_open:
            put_message(channel, Abort(transfer), timeout_s)
    put_message(channel, Commit(transfer), timeout_s)
    _answer(channel, transfer, timeout_s)
    return Receipt(manifest, index, time.monotonic() - start)


def buckets(manifest: Manifest, tensors: Mapping[str, Raw], bucket_bytes: int) -> Iterator[list[memoryview]]:
    """The bytes of all tensors, gaps as zeros, cut into buckets; each as pieces, so that nothing is copied here."""
    pieces: list[memoryview] = []
    room, at = bucket_bytes, 0
    for entry in manifest.tensors:
        data = tensors[entry.name].data
        for run in (memoryview(bytes(entry.offset - at)), data.cast("B") if data.nbytes else memoryview(b"")):
            while run.nbytes:
                pieces.append(run[:room])
                room, run = room - pieces[-1].nbytes, run[room:]
                if room == 0:
                    yield pieces
                    pieces, room = [], bucket_bytes
        at = entry.end
    if pieces:
        yield pieces


class Receiver:
    """The other end: takes one transfer at a time into its target. Single writer: the loop that calls `receive`."""

    def __init__(self, channel: Channel, target: Target, *, must_change: bool = True) -> None:
        self._channel = channel
        self._target = target
        self._must_change = must_change
        self.installed: Manifest | None = None
        self.has_begun = False  # whether the last `receive` saw a transfer, so that its error is one of a transfer

    def receive(self, *, idle_s: float, timeout_s: float = DEFAULT_TIMEOUT_S) -> Manifest:
        """Wait for a transfer up to `idle_s`, and take it. Out: what is installed now.

        Errors: TransferError, the old version serves on; what `install` raises, likewise.
        """
        self.has_begun = False
        prepare = self._next(idle_s)
        self.has_begun = True
        while not isinstance(prepare, Prepare):  # what is left of a transfer that was refused
            prepare = self._next(timeout_s)
        reply: Message = Refused(prepare.transfer, "install", "the target could not install it")
        try:
            self._accept(prepare, timeout_s)
            reply = Committed(prepare.transfer, prepare.manifest.version)
        except TransferError as error:
            reply = Refused(prepare.transfer, error.check, str(error))
            raise
        finally:
            if self._channel.is_open:
                put_message(self._channel, reply, timeout_s)
        self.installed = prepare.manifest
        return prepare.manifest

    def _accept(self, prepare: Prepare, timeout_s: float) -> None:
        manifest, target = prepare.manifest, self._target
        check(
            manifest,
            expected=target.expected,
            before=self.installed,
            version=target.version,
            must_change=self._must_change,
        )
        staged = target.stage(manifest)
        put_message(self._channel, Ready(prepare.transfer), timeout_s)
        self._fill(prepare, staged, timeout_s)
        verify(manifest, staged)
        try:
            target.pause()
            target.install(manifest, staged)
        finally:
            target.resume()

    def _fill(self, prepare: Prepare, staged: memoryview, timeout_s: float) -> None:
        """Take buckets up to the commit; after a wrong one the rest is only drained, so that the sender gets on."""
        refusal: TransferError | None = None
        index = offset = 0
        while True:
            frame = self._channel.get(timeout_s=timeout_s)
            try:
                message = decode(frame.header)
                if isinstance(message, Bucket) and refusal is None:
                    refusal = _fault(message, frame, prepare, index, offset)
                    if refusal is None:
                        staged[offset : offset + message.num_bytes] = frame.body
                        index, offset = index + 1, offset + message.num_bytes
            finally:
                frame.release()
            if isinstance(message, Abort) and message.transfer == prepare.transfer:
                raise TransferError("the sender gave up", check="aborted")
            if isinstance(message, Commit) and message.transfer == prepare.transfer:
                break
        if refusal is not None:
            raise refusal
        if offset != prepare.manifest.num_bytes:
            raise TransferError(f"{offset} of {prepare.manifest.num_bytes} bytes came", check="count")

    def _next(self, timeout_s: float) -> Message:
        frame = self._channel.get(timeout_s=timeout_s)
        message = decode(frame.header)
        frame.release()
        return message


def _fault(bucket: Bucket, frame: Frame, prepare: Prepare, index: int, offset: int) -> TransferError | None:
    """Why a bucket is not the one that is due."""
    if bucket.transfer != prepare.transfer:
        return TransferError(f"bucket {bucket.index} belongs to another transfer", check="transfer")
    if (bucket.index, bucket.offset) != (index, offset):
        why = f"bucket {bucket.index} at {bucket.offset} came, {index} at {offset} was due"
        return TransferError(why, check="order")
    if frame.body.nbytes != bucket.num_bytes:
        why = f"bucket {index} has {frame.body.nbytes} bytes, not {bucket.num_bytes}"
        return TransferError(why, check="length")
    if offset + bucket.num_bytes > prepare.manifest.num_bytes:
        return TransferError(f"more than {prepare.manifest.num_bytes} bytes came", check="count")
    return None


def _answer(channel: Channel, transfer: str, timeout_s: float) -> None:
    """Wait for the answer to this transfer. Errors: TransferError as the receiver says."""
    while True:
        frame = channel.get(timeout_s=timeout_s)
        message = decode(frame.header)
        frame.release()
        if isinstance(message, Refused) and message.transfer == transfer:
            raise TransferError(message.why.removeprefix(f"{message.check}: "), check=message.check)
        if isinstance(message, Ready | Committed) and message.transfer == transfer:
            return
