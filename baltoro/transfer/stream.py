"""A connected socket whose every wait has a limit and whose end is an error: what channels over sockets are built on.

In: a connected stream socket. Out: bytes there and back. Errors: TransferError(peer) if the other end is gone or this
one closed, TransferError(timeout). Single writer: its channel.
"""

from __future__ import annotations

import select
import socket
import time

from baltoro.errors import TransferError


class Stream:
    """See the module. What is received, sent or waited for after `limit` has to be done within its time."""

    def __init__(self, end: socket.socket, timeout_s: float) -> None:
        self._socket: socket.socket | None = end
        self._deadline = time.monotonic() + timeout_s

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def limit(self, timeout_s: float) -> None:
        """From now on."""
        self._deadline = time.monotonic() + timeout_s

    def limited(self) -> socket.socket:
        """The socket, with what is left of the time."""
        if self._socket is None:
            raise TransferError("this end is closed", check="peer")
        self._socket.settimeout(max(self._deadline - time.monotonic(), 0.001))
        return self._socket

    def send(self, data: bytes | bytearray | memoryview) -> None:
        end = self.limited()
        try:
            end.sendall(data)
        except TimeoutError as error:
            raise TransferError("the other end does not read", check="timeout") from error
        except OSError as error:
            raise self.gone(error) from error

    def receive(self, count: int) -> bytearray:
        """So many bytes, in memory of their own."""
        found = bytearray(count)
        rest = memoryview(found)
        while rest.nbytes:
            end = self.limited()
            try:
                num_read = end.recv_into(rest)
            except TimeoutError as error:
                raise TransferError("nothing came in time", check="timeout") from error
            except OSError as error:
                raise self.gone(error) from error
            if not num_read:
                raise self.gone("it ended")
            rest = rest[num_read:]
        return found

    def poll(self, timeout_s: float) -> bool:
        """Whether something is there to be received within `timeout_s`, the other end's end included."""
        return bool(select.select([self.limited()], [], [], timeout_s)[0])

    def gone(self, why: object) -> TransferError:
        """The error to raise; the socket is closed."""
        self.close()
        return TransferError(f"the other end is gone: {why}", check="peer")

    def close(self) -> None:
        """May be called again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
