"""Channels over TCP: who lacks the key is not heard, and a frame that was touched on its way ends the channel.

What every channel does is in `test_local.py`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from baltoro.errors import ConfigError, TransferError
from baltoro.transfer.socket import (
    HEAD,
    HELLO,
    MAX_HEADER_BYTES,
    TAG_BYTES,
    SocketChannel,
    SocketListener,
    call,
    open_door,
)
from tests.transfer.ends import KEY, tcp_pair


def joined(edit: Callable[[bytes], bytes], count: int) -> SocketChannel:
    """The end that hears what the other one said, its frames edited by a stranger on the way; `count`: bytes of them.
    The greeting passes as it is."""
    near, one = socket.socketpair()
    far, other = socket.socketpair()
    with ThreadPoolExecutor(2) as threads:
        sender = threads.submit(SocketChannel, one, 1024, KEY, is_listener=False)
        hearer = threads.submit(SocketChannel, other, 1024, KEY, is_listener=True)
        for size in (HELLO.size, TAG_BYTES):
            said, heard = near.recv(size, socket.MSG_WAITALL), far.recv(size, socket.MSG_WAITALL)
            far.sendall(said)
            near.sendall(heard)
        for header in (b"one", b"two"):
            sender.result(5).put(header, [memoryview(b"body")], timeout_s=1)
        far.sendall(edit(near.recv(count, socket.MSG_WAITALL)))
    return hearer.result(5)


FRAME = HEAD.size + len(b"one") + len(b"body") + TAG_BYTES


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.fixture(autouse=True)
def _no_nodelay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets of a pair are not TCP."""
    monkeypatch.setattr(SocketChannel, "_hurry", lambda *_: None)


def test_what_was_not_touched_arrives() -> None:
    channel = joined(lambda data: data, 2 * FRAME)
    assert [channel.get(timeout_s=1).header for _ in range(2)] == [b"one", b"two"]


@pytest.mark.parametrize(
    "edit",
    [
        flipped(0),  # its kind
        flipped(HEAD.size),  # header
        flipped(HEAD.size + 3),  # body
        flipped(FRAME - 1),  # tag
        lambda data: data[FRAME:] + data[:FRAME],  # in another order
        lambda data: data[FRAME:],  # one is left out
    ],
    ids=["kind", "header", "body", "tag", "order", "left out"],
)
def test_a_touched_frame_ends_the_channel(edit: Callable[[bytes], bytes]) -> None:
    channel = joined(edit, 2 * FRAME)
    with pytest.raises(TransferError, match=r"^forged: "):
        channel.get(timeout_s=1)
    assert not channel.is_open


def test_a_frame_that_comes_twice_is_forged() -> None:
    channel = joined(lambda data: data[:FRAME] * 2, 2 * FRAME)
    assert channel.get(timeout_s=1).header == b"one"
    with pytest.raises(TransferError, match=r"^forged: "):
        channel.get(timeout_s=1)


@pytest.mark.parametrize("sizes", [(MAX_HEADER_BYTES + 1, 0), (1, 1025)])
def test_no_memory_is_taken_for_a_length_that_cannot_be(sizes: tuple[int, int]) -> None:
    channel = joined(lambda data: HEAD.pack(1, *sizes) + data, 2 * FRAME)
    with pytest.raises(TransferError, match=r"^size: "):
        channel.get(timeout_s=1)


def test_who_has_another_key_is_not_heard() -> None:
    with pytest.raises(TransferError, match=r"^(forged|peer): "):
        tcp_pair(other=bytes(32))


def test_nobody_there_and_a_taken_port_are_said() -> None:
    with open_door("127.0.0.1", 0) as door:
        port = door.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another"):
            open_door("127.0.0.1", port)
        with pytest.raises(TransferError, match="timeout: nobody connected"):
            SocketListener(door, KEY).accept(timeout_s=0.05)
    with pytest.raises(TransferError, match="peer: nobody listens"):
        call("127.0.0.1", port, KEY)
