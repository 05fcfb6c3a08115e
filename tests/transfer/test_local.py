"""Channels, of both kinds: order, bound, time limits, and an end that dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from baltoro.errors import TransferError
from baltoro.transfer.channel import MAX_IN_FLIGHT
from baltoro.transfer.local import Listener, LocalChannel, connect, pair
from baltoro.transfer.socket import SocketChannel
from tests.transfer.ends import tcp_pair

ROOT = Path(__file__).resolve().parents[2]


Ends = tuple[LocalChannel, LocalChannel] | tuple[SocketChannel, SocketChannel]


@pytest.fixture(params=[pair, tcp_pair])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    one, other = request.param(1024)
    yield one, other
    one.close()
    other.close()


def refused(check: str) -> pytest.RaisesExc[TransferError]:
    return pytest.raises(TransferError, match=f"^{check}: ")


def test_frames_come_in_order_with_their_pieces_joined(ends: Ends) -> None:
    one, other = ends
    one.put(b"first", [memoryview(b"ab"), memoryview(b""), memoryview(b"cd")], timeout_s=1)
    one.put(b"second", timeout_s=1)
    frames = [other.get(timeout_s=1) for _ in range(2)]
    assert [(frame.header, frame.body.tobytes()) for frame in frames] == [(b"first", b"abcd"), (b"second", b"")]
    assert frames[0].body.readonly


def test_both_ends_can_send(ends: Ends) -> None:
    for a, b in (ends, ends[::-1]):
        a.put(b"h", [memoryview(b"body")], timeout_s=1)
        frame = b.get(timeout_s=1)
        assert frame.body.tobytes() == b"body"
        frame.release()
        a.wait(timeout_s=1)


def test_no_more_than_two_bodies_are_in_flight(ends: Ends) -> None:
    one, other = ends
    body = [memoryview(bytes(1024))]
    for _ in range(MAX_IN_FLIGHT):
        one.put(b"", body, timeout_s=1)
    with refused("timeout"):
        one.put(b"", body, timeout_s=0.05)
    with refused("timeout"):
        one.wait(timeout_s=0.05)
    other.get(timeout_s=1).release()
    one.put(b"", body, timeout_s=1)
    assert one.most_in_flight == MAX_IN_FLIGHT == 2


def test_a_body_stays_until_it_is_released(ends: Ends) -> None:
    one, other = ends
    one.put(b"", [memoryview(b"a" * 1024)], timeout_s=1)
    first = other.get(timeout_s=1)
    one.put(b"", [memoryview(b"b" * 1024)], timeout_s=1)
    assert first.body.tobytes() == b"a" * 1024


def test_a_body_over_the_bucket_is_refused(ends: Ends) -> None:
    with refused("size"):
        ends[0].put(b"", [memoryview(bytes(1000)), memoryview(bytes(25))], timeout_s=1)


def test_nothing_is_waited_for_without_end(ends: Ends) -> None:
    with refused("timeout"):
        ends[0].get(timeout_s=0.05)


def test_a_closed_end_is_an_error_at_both(ends: Ends) -> None:
    one, other = ends
    one.put(b"last", timeout_s=1)
    one.close()
    one.close()
    assert other.get(timeout_s=1).header == b"last"
    for end in ends:
        with refused("peer"):
            end.get(timeout_s=1)
        assert not end.is_open
        with refused("peer"):
            end.put(b"", timeout_s=1)


def test_a_header_of_a_megabyte_passes(ends: Ends) -> None:
    one, other = ends
    sender = Thread(target=lambda: one.put(b"x" * 1_000_000, timeout_s=5))
    sender.start()
    assert len(other.get(timeout_s=5).header) == 1_000_000
    sender.join()


CHILD = """
import sys
from baltoro.transfer.local import connect
channel = connect(sys.argv[1], 4096)
while True:
    frame = channel.get(timeout_s=10)
    channel.put(frame.header, [memoryview(bytes(frame.body)[::-1])], timeout_s=10)
    frame.release()
    if frame.header == b"die":
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_two_processes_talk_and_the_death_of_one_is_seen(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    listener = Listener(tmp_path / "socket")
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(listener.path)], cwd=ROOT)
    channel = listener.accept(8192, timeout_s=30)
    for header in (b"one", b"two", b"die"):
        channel.put(header, [memoryview(b"abc")], timeout_s=10)
        frame = channel.get(timeout_s=10)
        assert (frame.header, frame.body.tobytes()) == (header, b"cba")
        if header == b"die":
            assert child.wait() == -9
        frame.release()  # harmless when nobody is left to be told
    with refused("peer"):
        channel.get(timeout_s=10)
    channel.close()
    listener.close()
    assert not listener.path.exists()
    if before:
        assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("tmp")}


def test_nobody_there_is_said(tmp_path: Path) -> None:
    with refused("peer"):
        connect(tmp_path / "socket")
    listener = Listener(tmp_path / "socket")
    with refused("timeout"):
        listener.accept(timeout_s=0.05)
    listener.close()
