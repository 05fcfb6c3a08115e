"""Channels between hosts: two ends over TCP, each of which has shown the other that it has the same key.

In: host, port, a key of 32 bytes that both ends were told in private (`rl`: over an encrypted connection, a new one for
each). Out: `SocketChannel`, a `Channel`.

    both ends      hello: a number nobody used before, bucket_bytes
    both ends      proof: keyed hash of both hellos and of who says it; who cannot make it is not listened to
    then frames    head, header, body, tag: keyed hash of all of it and of the frame's number on its way

Invariants: a frame that was changed, left out, sent again or made by a stranger on the way is TransferError(forged),
and ends the channel; no length is believed beyond MAX_HEADER_BYTES and the other end's bucket; the memory of bodies is
two buckets. Nothing here is encrypted: who can listen on the way reads headers and bodies.
Source: BLAKE2b with a key (RFC 7693).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

from baltoro.errors import ConfigError, TransferError
from baltoro.transfer.channel import MAX_IN_FLIGHT, Frame, body_bytes
from baltoro.transfer.local import DEFAULT_BUCKET_BYTES
from baltoro.transfer.stream import Stream

HELLO = struct.Struct("<8s32sQ")  # format, number, bucket_bytes of the end that says it
FORMAT = b"baltoro1"
HEAD = struct.Struct("<BIQ")  # kind; length of the header; length of the body
FRAME, FREE = 1, 2
TAG_BYTES = 32
MAX_HEADER_BYTES = 64 << 20
GREETING_S = 3.0
"""How long whoever connects may take to show that it has the key: others wait behind it meanwhile."""
GIVE_BACK_S = 10.0


class SocketChannel:
    """One end. See the module and the contract."""

    def __init__(
        self, end: socket.socket, bucket_bytes: int, key: bytes, *, is_listener: bool, timeout_s: float = GREETING_S
    ) -> None:
        """Shake hands. Errors: TransferError(forged) where the other end lacks the key, peer, timeout, format."""
        self._stream = Stream(end, timeout_s)
        self._bucket_bytes = bucket_bytes
        self._inbox: deque[Frame] = deque()
        self._num_out = self._num_held = 0  # bodies on their way there; bodies here that were not given back
        self._num_sent = self._num_taken = 0  # frames
        self.most_in_flight = 0
        try:
            self._hurry(end)
            self._greet(key, b"listener" if is_listener else b"caller", b"caller" if is_listener else b"listener")
        except TransferError:
            self._stream.close()
            raise

    def _hurry(self, end: socket.socket) -> None:
        """A frame goes out when it is whole: none waits for the answer to the one before it."""
        try:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:  # of one that has gone already
            raise self._stream.gone(error) from error

    def _greet(self, key: bytes, own: bytes, other: bytes) -> None:
        said = HELLO.pack(FORMAT, secrets.token_bytes(32), self._bucket_bytes)
        self._stream.send(said)
        heard = bytes(self._stream.receive(HELLO.size))
        form, _, self._their_bytes = HELLO.unpack(heard)
        if form != FORMAT:
            raise TransferError("this is no channel of ours", check="format")
        hellos = b"".join(sorted((said, heard)))
        self._send_key, self._take_key = _hash(key, own, hellos), _hash(key, other, hellos)
        self._stream.send(_hash(self._send_key, b"proof"))
        if not hmac.compare_digest(bytes(self._stream.receive(TAG_BYTES)), _hash(self._take_key, b"proof")):
            raise TransferError("the other end does not have the key", check="forged")

    @property
    def bucket_bytes(self) -> int:
        return self._bucket_bytes

    @property
    def is_open(self) -> bool:
        return self._stream.is_open

    def put(self, header: bytes, pieces: Sequence[memoryview] = (), *, timeout_s: float) -> None:
        self._stream.limit(timeout_s)
        num_bytes = body_bytes(pieces, self._bucket_bytes)
        if num_bytes:
            while self._num_out == MAX_IN_FLIGHT:
                self._take()
            self._num_out += 1
            self.most_in_flight = max(self.most_in_flight, self._num_out)
        self._send(FRAME, header, pieces)

    def get(self, *, timeout_s: float) -> Frame:
        self._stream.limit(timeout_s)
        while not self._inbox:
            self._take()
        return self._inbox.popleft()

    def poll(self, *, timeout_s: float) -> bool:
        return bool(self._inbox) or self._stream.poll(timeout_s)

    def wait(self, *, timeout_s: float) -> None:
        self._stream.limit(timeout_s)
        while self._num_out:
            self._take()

    def close(self) -> None:
        self._stream.close()

    def _send(self, kind: int, header: bytes, pieces: Sequence[memoryview] = ()) -> None:
        head = HEAD.pack(kind, len(header), sum(piece.nbytes for piece in pieces)) + header
        tag = _hash(self._send_key, self._num_sent.to_bytes(8, "little"), head, *pieces)
        self._num_sent += 1
        self._stream.send(head)
        for piece in pieces:
            self._stream.send(piece)
        self._stream.send(tag)

    def _take(self) -> None:
        """Take one frame from the socket and see to it."""
        head = self._stream.receive(HEAD.size)
        kind, header_bytes, num_bytes = HEAD.unpack(head)
        has_room = not num_bytes or self._num_held < MAX_IN_FLIGHT
        if header_bytes > MAX_HEADER_BYTES or num_bytes > self._their_bytes or not has_room:
            raise self._end(f"a frame of {header_bytes} and {num_bytes} bytes, {self._num_held} bodies held", "size")
        header, body = self._stream.receive(header_bytes), self._stream.receive(num_bytes)
        tag, number = bytes(self._stream.receive(TAG_BYTES)), self._num_taken.to_bytes(8, "little")
        if not hmac.compare_digest(tag, _hash(self._take_key, number, head, header, body)):
            raise self._end("a frame is not the one that was sent", "forged")
        self._num_taken += 1
        if kind == FREE:
            self._num_out -= 1
            return
        self._num_held += bool(num_bytes)
        view = memoryview(body).toreadonly()
        self._inbox.append(Frame(bytes(header), view, self._give_back if num_bytes else lambda: None))

    def _give_back(self) -> None:
        """Tell the other end that it may send another body. One that is gone needs it no more: the next get or put
        says so, where somebody can act on it."""
        self._num_held -= 1
        if not self._stream.is_open:
            return
        self._stream.limit(GIVE_BACK_S)
        try:
            self._send(FREE, b"")
        except TransferError as error:
            if error.check != "peer":
                raise

    def _end(self, why: str, check: str) -> TransferError:
        """What comes after such a frame means nothing."""
        self._stream.close()
        return TransferError(why, check=check)


class SocketListener:
    """Takes connections of those who have the key, at a socket that is bound and listens; others are turned away."""

    def __init__(self, door: socket.socket, key: bytes) -> None:
        """`door` stays its owner's; several listeners may follow each other at one."""
        self._door, self._key = door.dup(), key

    def accept(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES, *, timeout_s: float) -> SocketChannel:
        """The next one to connect. Errors: TransferError(timeout); what SocketChannel says of a stranger."""
        self._door.settimeout(timeout_s)
        try:
            end, _ = self._door.accept()
        except TimeoutError as error:
            raise TransferError("nobody connected", check="timeout") from error
        except OSError as error:
            if self._door.fileno() < 0:
                raise  # this one is closed
            raise TransferError(f"somebody connected and was gone: {error}", check="peer") from error
        return SocketChannel(end, bucket_bytes, self._key, is_listener=True)

    def close(self) -> None:
        self._door.close()


def open_door(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any free one. Errors: ConfigError where that is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=8)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen at {host}:{port} ({error}); choose another address or port") from error


def call(
    host: str, port: int, key: bytes, bucket_bytes: int = DEFAULT_BUCKET_BYTES, *, timeout_s: float = 10.0
) -> SocketChannel:
    """The other end of a `SocketListener`. Errors: TransferError(peer) if nobody listens, or turns us away."""
    try:
        end = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise TransferError(f"nobody listens at {host}:{port}: {error}", check="peer") from error
    return SocketChannel(end, bucket_bytes, key, is_listener=False, timeout_s=timeout_s)


def _hash(key: bytes, *parts: bytes | bytearray | memoryview) -> bytes:
    """Keyed, of the parts one after the other."""
    found = blake2b(key=key, digest_size=TAG_BYTES)
    for part in parts:
        found.update(part)
    return found.digest()
