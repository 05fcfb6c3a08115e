"""What an engine is reached by: a child process of this one, or (`engine_remote.py`) a process of another host.

In: frames. Out: frames, and the reason once nobody is there any more. Invariants: no wait is without a limit; what a
child has on the machine is one private folder, which whoever lives longer removes: this end, or the engine when this
process is killed (`engine.worker.end_with_parent`).
Not here: what the frames mean (`engine_link.py`).
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import zmq

from baltoro.protocol.worker import Detach, Shutdown
from baltoro.transfer.channel import Channel
from baltoro.transfer.local import RAM, connect

STOP_S = 10.0
"""How long the engine may take to leave before it is killed."""


class End(Protocol):
    """Single writer: its link."""

    farewell: Shutdown | Detach  # what the engine is told at the end

    def send(self, frame: bytes) -> None:
        """To the engine, which has spoken first, or is to."""

    def wait(self, timeout_s: float) -> None:
        """Until something has come or ended, `timeout_s` at most."""

    def receive(self) -> bytes | None:
        """A frame that is here."""

    def lost(self) -> str | None:
        """Why the engine is gone, once it is."""

    def channel(self, info: Mapping[str, Any], bucket_bytes: int, timeout_s: float) -> Channel:
        """For one publication; `info`: the engine's. Errors: TransferError."""

    def close(self, *, was_told: bool) -> None:
        """Let go. `was_told`: farewell was sent."""


class Child:
    """One engine process of this one and the socket to it. `start`, then anything, then `close`."""

    farewell: Shutdown | Detach = Shutdown(is_draining=False)

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="baltoro-", dir=RAM if RAM.is_dir() else None))
        self.address = f"ipc://{self.folder}/engine"
        self._engine = b""
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for name in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(name, 0)
        self._socket.bind(self.address)
        self._let_go = weakref.finalize(self, let_go, self._context, self._socket)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._process: multiprocessing.process.BaseProcess | None = None
        self._has_ended = False

    @property
    def versions(self) -> str:
        """Where the engine listens for publications."""
        return str(self.folder / "versions")

    @property
    def process_id(self) -> int:
        """Of the engine."""
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    def start(self, entry: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Run `entry(*arguments)`. Spawned, not forked: it must not inherit this process's sockets and threads."""
        self._process = multiprocessing.get_context("spawn").Process(
            target=entry, args=arguments, name="baltoro-engine", daemon=True
        )
        self._process.start()
        self._poller.register(self._process.sentinel, zmq.POLLIN)

    def send(self, frame: bytes) -> None:
        self._socket.send_multipart([self._engine, frame])

    def wait(self, timeout_s: float) -> None:
        here = dict(self._poller.poll(int(max(0.0, timeout_s) * 1000)))
        self._has_ended = self._process is not None and self._process.sentinel in here

    def receive(self) -> bytes | None:
        if not self._socket.poll(0):
            return None
        self._engine, frame = self._socket.recv_multipart()
        return frame

    def lost(self) -> str | None:
        if self._process is None or not self._has_ended or self._socket.poll(0):
            return None
        self._process.join(STOP_S)
        return f"its process ended with exit code {self._process.exitcode}"

    def channel(self, info: Mapping[str, Any], bucket_bytes: int, timeout_s: float) -> Channel:
        return connect(self.versions, bucket_bytes, timeout_s=timeout_s)

    def close(self, *, was_told: bool) -> None:
        """End the engine and remove what is on the machine."""
        process = self._process
        if process is not None:
            if was_told:
                process.join(STOP_S)
            for stop in (process.terminate, process.kill):
                if process.is_alive():
                    stop()
                    process.join(STOP_S)
        self._let_go()
        self._remove()


def let_go(context: zmq.Context[zmq.Socket[bytes]], *sockets: zmq.Socket[bytes]) -> None:
    """Close them, then the context, also where nobody has: a context that is collected before its sockets waits for
    ever."""
    for socket in sockets:
        socket.close()
    context.term()
