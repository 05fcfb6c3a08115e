"""Both ends of a channel over TCP, in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from baltoro.transfer.socket import SocketChannel, SocketListener, call, open_door

KEY = bytes(range(32))


def tcp_pair(bucket_bytes: int = 1024, key: bytes = KEY, other: bytes = KEY) -> tuple[SocketChannel, SocketChannel]:
    """Both ends."""
    with open_door("127.0.0.1", 0) as door, ThreadPoolExecutor(1) as thread:
        listener = SocketListener(door, key)
        accepted = thread.submit(listener.accept, bucket_bytes, timeout_s=5.0)
        try:
            one = call("127.0.0.1", door.getsockname()[1], other, bucket_bytes)
            return one, accepted.result(10)
        finally:
            listener.close()
