"""Channels on one machine: two ends in one process, or in two, over a socket and shared memory.

In: a path of a Unix socket, or nothing (`pair`). Out: `LocalChannel`, a `Channel`.
Each end brings memory for the bodies that it sends (`MAX_IN_FLIGHT` buckets, a file without a name, in RAM where
/dev/shm is) and hands its descriptor to the other end at the start; headers and "this body is free" go over the socket.
Invariants: nothing has a name that could outlive a killed process but the socket's path, which the next `listen`
replaces; pages of memory that no body ever used are never made.
Source: unix(7), SCM_RIGHTS.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from baltoro.errors import TransferError
from baltoro.transfer.channel import MAX_IN_FLIGHT, Frame, body_bytes
from baltoro.transfer.stream import Stream

HEAD = struct.Struct("<BIQ")  # slot, or one of the two below; length of the header; length of the body
NO_BODY, FREE = 255, 254
HELLO = struct.Struct("<Q")  # bucket_bytes of the end that says it
RAM = Path("/dev/shm")
DEFAULT_BUCKET_BYTES = 16 << 20


class LocalChannel:
    """One end. See the module and the contract."""

    def __init__(self, end: socket.socket, bucket_bytes: int, *, timeout_s: float = 10.0) -> None:
        self._stream = Stream(end, timeout_s)
        self._own = _memory(bucket_bytes)
        self._inbox: deque[Frame] = deque()
        self._free = list(range(MAX_IN_FLIGHT))
        self._bucket_bytes = bucket_bytes
        self.most_in_flight = 0
        try:
            socket.send_fds(end, [HELLO.pack(bucket_bytes)], [self._own.fileno()])
        except OSError as error:
            raise self._stream.gone(error) from error
        self._mine = mmap.mmap(self._own.fileno(), MAX_IN_FLIGHT * bucket_bytes)
        self._theirs: mmap.mmap | None = None
        self._their_bytes = 0

    @property
    def bucket_bytes(self) -> int:
        return self._bucket_bytes

    @property
    def is_open(self) -> bool:
        return self._stream.is_open

    def put(self, header: bytes, pieces: Sequence[memoryview] = (), *, timeout_s: float) -> None:
        self._stream.limit(timeout_s)
        num_bytes = body_bytes(pieces, self._bucket_bytes)
        slot = NO_BODY
        if num_bytes:
            while not self._free:
                self._take()
            slot = self._free.pop()
            self.most_in_flight = max(self.most_in_flight, MAX_IN_FLIGHT - len(self._free))
            at = slot * self._bucket_bytes
            for piece in pieces:
                self._mine[at : at + piece.nbytes] = piece
                at += piece.nbytes
        self._stream.send(HEAD.pack(slot, len(header), num_bytes) + header)

    def get(self, *, timeout_s: float) -> Frame:
        self._stream.limit(timeout_s)
        while not self._inbox:
            self._take()
        return self._inbox.popleft()

    def poll(self, *, timeout_s: float) -> bool:
        if self._inbox:
            return True
        return self._stream.poll(timeout_s)

    def wait(self, *, timeout_s: float) -> None:
        self._stream.limit(timeout_s)
        while len(self._free) < MAX_IN_FLIGHT:
            self._take()

    def close(self) -> None:
        self._stream.close()
        if self._own.closed:
            return
        self._own.close()
        for frame in self._inbox:
            frame.body.release()
        for memory in (self._mine, self._theirs):
            try:
                if memory is not None:
                    memory.close()
            except BufferError:  # somebody still reads a body: its memory goes with the last view
                continue

    def _take(self) -> None:
        """Take one message from the socket and see to it."""
        if self._theirs is None:
            self._greet()
        slot, header_bytes, num_bytes = HEAD.unpack(self._stream.receive(HEAD.size))
        header = bytes(self._stream.receive(header_bytes))
        if slot == FREE:
            self._free.append(header[0])
            return
        body = memoryview(b"")
        if slot != NO_BODY:
            if slot >= MAX_IN_FLIGHT or num_bytes > self._their_bytes or self._theirs is None:
                raise TransferError(f"slot {slot} with {num_bytes} bytes does not exist", check="size")
            at = slot * self._their_bytes
            body = memoryview(self._theirs)[at : at + num_bytes].toreadonly()
        self._inbox.append(Frame(header, body, lambda: self._give_back(slot)))

    def _give_back(self, slot: int) -> None:
        """Tell the other end that its memory is free again. One that is gone needs it no more: the next get or put
        says so, where somebody can act on it."""
        if slot == NO_BODY or not self._stream.is_open:
            return
        self._stream.limit(10.0)
        with suppress(BrokenPipeError, ConnectionResetError):
            try:
                self._stream.limited().sendall(HEAD.pack(FREE, 1, 0) + bytes([slot]))
            except TimeoutError as error:
                raise TransferError("the other end does not read", check="timeout") from error

    def _greet(self) -> None:
        """Map the other end's memory."""
        end = self._stream.limited()
        try:
            text, descriptors, _, _ = socket.recv_fds(end, HELLO.size, 1)
        except TimeoutError as error:
            raise TransferError("the other end does not answer", check="timeout") from error
        except OSError as error:
            raise self._stream.gone(error) from error
        if len(text) != HELLO.size or not descriptors:
            raise self._stream.gone("it ended before it said hello")
        (self._their_bytes,) = HELLO.unpack(text)
        self._theirs = mmap.mmap(descriptors[0], MAX_IN_FLIGHT * self._their_bytes, prot=mmap.PROT_READ)
        os.close(descriptors[0])


def pair(bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> tuple[LocalChannel, LocalChannel]:
    """Both ends, for two threads of one process or a process and its fork."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return LocalChannel(one, bucket_bytes), LocalChannel(other, bucket_bytes)


class Listener:
    """Where other processes of this machine can connect to; only those of the same user may."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.unlink(missing_ok=True)  # of one that was killed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self.path))
        self.path.chmod(0o600)
        self._socket.listen(1)

    def accept(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES, *, timeout_s: float) -> LocalChannel:
        """The next one to connect. Errors: TransferError(timeout)."""
        self._socket.settimeout(timeout_s)
        try:
            end, _ = self._socket.accept()
        except TimeoutError as error:
            raise TransferError(f"nobody connected to {self.path}", check="timeout") from error
        return LocalChannel(end, bucket_bytes)

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)


def connect(path: str | Path, bucket_bytes: int = DEFAULT_BUCKET_BYTES, *, timeout_s: float = 10.0) -> LocalChannel:
    """The other end of a `Listener` that is there already. Errors: TransferError(peer)."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(timeout_s)
    try:
        end.connect(str(path))
    except OSError as error:
        end.close()
        raise TransferError(f"nobody listens at {path}: {error}", check="peer") from error
    return LocalChannel(end, bucket_bytes)


def _memory(bucket_bytes: int) -> IO[bytes]:
    """A file without a name, as long as all buckets of one end."""
    folder = RAM if RAM.is_dir() else None
    file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as the channel)
    file.truncate(MAX_IN_FLIGHT * bucket_bytes)
    return file
