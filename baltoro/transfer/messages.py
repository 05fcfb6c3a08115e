"""What the two ends of a transaction say to each other: headers of frames, as JSON; only a bucket has a body.

In: Messages. Out: the same Messages, or TransferError("format"). What they mean, and their order: `transaction.py`.
"""

from __future__ import annotations

import msgspec

from baltoro.errors import TransferError
from baltoro.transfer.channel import Channel
from baltoro.transfer.manifest import Manifest


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """A new version is to come. `transfer` names this attempt, so that no bucket of another is taken for its own."""

    transfer: str
    manifest: Manifest


class Bucket(msgspec.Struct, frozen=True, tag=True):
    """The frame's body is these bytes of the whole."""

    transfer: str
    index: int
    offset: int
    num_bytes: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """That was all."""

    transfer: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The sender could not go on."""

    transfer: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Buckets may come."""

    transfer: str


class Committed(msgspec.Struct, frozen=True, tag=True):
    """The new version serves."""

    transfer: str
    version: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The old version serves on."""

    transfer: str
    check: str
    why: str


Message = Prepare | Bucket | Commit | Abort | Ready | Committed | Refused


def encode(message: Message) -> bytes:
    """A frame's header."""
    return msgspec.json.encode(message)


def put_message(channel: Channel, message: Message, timeout_s: float) -> None:
    """A frame without a body. Errors: those of the channel."""
    channel.put(encode(message), timeout_s=timeout_s)


def decode(header: bytes) -> Message:
    """Errors: TransferError for what is no message."""
    try:
        return msgspec.json.decode(header, type=Message)
    except msgspec.MsgspecError as error:
        raise TransferError(f"a frame that is no message: {error}", check="format") from error
