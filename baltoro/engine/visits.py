"""An engine that trainers of other hosts use, one after the other: what happens when one comes and when it leaves.

    Attach    a door for its publications, with a key that only this trainer is told; Hello with all that it must know
    Detach    the door is closed, the engine woken, everything that the trainer asked for aborted and thrown away

In: Attach and Detach, from the engine's own thread. Out: Hello on the line; an engine as it was, but for versions.
Invariants: the version that served goes on serving, and its number too: the next trainer's versions are above it (its
`EnginePolicy` counts on from there); no delta of one trainer reaches another; a publication of a trainer that has left
installs nothing.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from typing import Any

from baltoro.engine.engine import Engine
from baltoro.engine.gate import Gate
from baltoro.engine.line import Line
from baltoro.engine.publish import Publisher, PublishOptions
from baltoro.observe import log, logger
from baltoro.protocol.worker import Attach, Detach, Hello
from baltoro.transfer.socket import SocketListener


class Visits:
    """See the module. Single writer: the worker's loop."""

    def __init__(self, line: Line, engine: Engine, gate: Gate, door: socket.socket, facts: Mapping[str, Any]) -> None:
        """`door`: listens for publications; `facts`: of the Hello, besides what the engine says of itself."""
        self._line, self._engine, self._gate, self._door, self._facts = line, engine, gate, door, facts
        self._publisher: Publisher | None = None
        self._logger = logger("engine")

    def change(self, message: Attach | Detach) -> None:
        """A trainer comes or leaves."""
        if isinstance(message, Attach):
            self._begin(message)
        else:
            self._end(message.why)

    def close(self) -> None:
        """May be called again."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _begin(self, attach: Attach) -> None:
        key = secrets.token_bytes(32)
        options = PublishOptions(
            name=attach.name,
            fields=attach.fields,
            expected=attach.expected,
            running=attach.running,
            must_change=attach.must_change,
            bucket_bytes=attach.bucket_bytes,
            timeout_s=attach.timeout_s,
        )
        self._publisher = Publisher(self._engine, self._gate, options, SocketListener(self._door, key))
        self._publisher.start()
        publish = {"port": self._door.getsockname()[1], "key": key.hex()}
        info: dict[str, Any] = {**self._engine.describe(), **self._facts, "publish": publish}
        self._line.send(Hello(info=info))
        log(self._logger, "a trainer has come", serves=self._serves(attach.name))

    def _end(self, why: str) -> None:
        name = "" if self._publisher is None else self._publisher.name
        self.close()
        self._engine.wake()
        self._engine.abort()
        while self._engine.has_work:
            self._engine.step()
        log(self._logger, "the trainer has left", why=why, serves=self._serves(name))

    def _serves(self, name: str) -> int:
        """The version's number; 0 is the base."""
        version = self._engine.adapters.latest(name)
        return 0 if version is None else version.number
