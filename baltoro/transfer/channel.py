"""The contract of a channel: frames, a few bytes of header and maybe a body, between two ends that may be anywhere.

In: `put` of a header and the pieces of a body. Out: `get` of a frame at the other end, in the same order.
Invariants: at most `MAX_IN_FLIGHT` bodies are anywhere between a `put` and the `release` at the other end, so what a
transfer takes is that many buckets, however much goes through; nothing waits for ever: every call has a time limit;
the end of the other process is an error, never a silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baltoro.errors import TransferError

MAX_IN_FLIGHT = 2  # one is filled while the other is emptied


@dataclass(frozen=True, slots=True)
class Frame:
    """What `get` gives. `body` is a view of the channel's own memory, valid until `release`, which is owed once."""

    header: bytes
    body: memoryview
    give_back: Callable[[], None]

    def release(self) -> None:
        self.body.release()
        self.give_back()


def body_bytes(pieces: Sequence[memoryview], bucket_bytes: int) -> int:
    """Of all pieces together. Errors: TransferError(size) over `bucket_bytes`."""
    num_bytes = sum(piece.nbytes for piece in pieces)
    if num_bytes > bucket_bytes:
        raise TransferError(f"a body of {num_bytes} bytes, buckets have {bucket_bytes}", check="size")
    return num_bytes


class Channel(Protocol):
    """One end. Single writer: one thread at a time on each end.

    Errors of all: TransferError(peer) if the other end is gone or this one closed, TransferError(timeout).
    """

    @property
    def bucket_bytes(self) -> int:
        """The largest body."""

    @property
    def is_open(self) -> bool:
        """Can the other end still be reached, as far as is known?"""

    def put(self, header: bytes, pieces: Sequence[memoryview] = (), *, timeout_s: float) -> None:
        """Send a frame; the pieces, one after the other, are its body. Waits while all bodies are in flight.

        Errors: also TransferError(size) for a body over `bucket_bytes`.
        """

    def get(self, *, timeout_s: float) -> Frame:
        """The next frame."""

    def poll(self, *, timeout_s: float) -> bool:
        """Whether `get` would find something now or within `timeout_s`: a message, or that the other end is gone."""

    def wait(self, *, timeout_s: float) -> None:
        """Until the other end has released every body."""

    def close(self) -> None:
        """Free everything. May be called again."""


class Accepts(Protocol):
    """Where others can connect to. Single writer: one thread."""

    def accept(self, bucket_bytes: int, *, timeout_s: float) -> Channel:
        """The next one. Errors: TransferError, timeout if nobody came."""

    def close(self) -> None:
        """Take nobody more."""
