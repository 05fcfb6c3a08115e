"""The engine's end of the Worker contract: messages in and out, and who may speak.

`ParentLine`: to the process that started this one, at an address that it gave. `HostLine`: open at an address, for
trainers of other hosts, one at a time. Both are context managers; on the way out of an error the other end is told why.
In: frames. Out: messages, in order; on a HostLine between a trainer's Attach and its Detach, which comes by itself when
the connection ends.
Invariants: nobody without the token is heard; a frame that cannot be read costs a trainer its place, not the engine its
life; what is sent to one that has left goes nowhere.
"""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Protocol, Self

import msgspec
import zmq

from baltoro.errors import ConfigError, InvariantError
from baltoro.protocol.worker import (
    WIRE_VERSION,
    Attach,
    Deltas,
    Detach,
    Dying,
    FromEngine,
    FromTrainer,
    Refused,
    ToEngine,
)
from baltoro.transfer.secure import as_listener

LINGER_MS = 2000
"""How long the last messages may take to leave after the end."""
PROBE_S = 1.0
"""How often a trainer that is told nothing is looked for."""


class Line(Protocol):
    """Single writer: the worker's loop."""

    socket: zmq.Socket[bytes]
    drains: bool  # on SIGTERM what runs is finished first

    @property
    def is_orphan(self) -> bool:
        """Whether nobody will ever speak again."""

    def receive(self) -> ToEngine | FromTrainer | None:
        """The next message that is here."""

    def send(self, message: FromEngine) -> None:
        """To whoever listens."""


class _Closing:
    """The way out: the reason as the last message, then the socket."""

    def __init__(self, kind: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in ((zmq.LINGER, LINGER_MS), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self.socket.setsockopt(option, value)

    def send(self, message: FromEngine) -> None:
        self.socket.send(self._encoder.encode(message))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.send(Dying(f"{kind.__name__}: {error}"))
        self.socket.close()
        self._context.term()


class ParentLine(_Closing):
    """To the process that started this one."""

    drains = True

    def __init__(self, address: str) -> None:
        super().__init__(zmq.DEALER)
        self._parent = os.getppid()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self.socket.connect(address)

    @property
    def is_orphan(self) -> bool:
        return os.getppid() != self._parent

    def receive(self) -> ToEngine | None:
        """Errors: InvariantError for what this version cannot read: both ends are one program."""
        if not self.socket.poll(0):
            return None
        try:
            return self._decoder.decode(self.socket.recv())
        except msgspec.DecodeError as error:
            raise InvariantError(f"the server sent what this version cannot read: {error}") from error


class HostLine(_Closing):
    """For trainers of other hosts, one at a time, who have the token."""

    drains = False
    is_orphan = False

    def __init__(self, address: str, token: str) -> None:
        """Errors: ConfigError where nobody can listen."""
        super().__init__(zmq.ROUTER)
        as_listener(self.socket, token)
        self.socket.setsockopt(zmq.IPV6, int("[" in address))
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # who has left is an error, and so we learn of it
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close()
            raise ConfigError(f"cannot listen at {address} ({error}); choose another address or port") from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._client, self._since, self._probed = b"", "", 0.0
        self._is_lost = False
        self._next: tuple[bytes, bytes] | None = None  # came first, and has to wait for a Detach
        self._decoder: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)

    def receive(self) -> FromTrainer | None:
        if self._client and time.monotonic() - self._probed > PROBE_S:
            self._probe()
        if self._has_lost():
            return self._leave("its connection ended")
        while self._next is not None or self.socket.poll(0):
            if self._next is None:
                sender, *_, frame = self.socket.recv_multipart()
                self._next = sender, frame
            sender, frame = self._next
            message = self._read(sender, frame)
            if self._has_lost():
                return self._leave("its connection ended")  # `_next` is read again afterwards
            self._next = None
            if message is not None:
                return message
        return None

    def send(self, message: FromEngine) -> None:
        if self._client and not self._is_lost:
            self._put(self._client, message)

    def _read(self, sender: bytes, frame: bytes) -> FromTrainer | None:
        """A message of the trainer that is here, or the Attach of one that now is."""
        try:
            message = self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            self._put(sender, Refused(f"this engine, wire version {WIRE_VERSION}, cannot read what came: {error}"))
            return self._leave("it sent what cannot be read") if sender == self._client else None
        if isinstance(message, Attach):
            return self._attach(sender, message)
        if sender != self._client:
            return None  # of one that was refused, or has left
        return self._leave(message.why) if isinstance(message, Detach) else message

    def _attach(self, sender: bytes, message: Attach) -> Attach | None:
        if message.version != WIRE_VERSION:
            why = f"the engine speaks wire version {WIRE_VERSION}, the trainer {message.version}"
            self._put(sender, Refused(f"{why}: run one version of baltoro on both hosts"))
            return None
        if self._client:
            self._probe()
            if not self._is_lost:
                self._put(sender, Refused(f"the engine has had a trainer since {self._since}, and takes one at a time"))
            return None
        self._client, self._since, self._probed = sender, time.strftime("%H:%M:%S"), time.monotonic()
        return message

    def _has_lost(self) -> bool:
        return self._is_lost

    def _leave(self, why: str) -> Detach:
        self._client, self._is_lost = b"", False
        return Detach(why)

    def _probe(self) -> None:
        self._probed = time.monotonic()
        self._put(self._client, Deltas(()))

    def _put(self, to: bytes, message: FromEngine) -> None:
        try:
            self.socket.send_multipart([to, self._encoder.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._is_lost |= to == self._client
