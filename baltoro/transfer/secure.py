"""pyzmq sockets between hosts: encrypted, open to those alone who have a token, and never silent for long.

In: a token that both hosts have been given. Out: options on a socket.
CURVE (CurveZMQ) with keys made from the token. The listener's public key never travels and is as secret as the token:
who cannot compute it cannot begin a handshake, so no list of callers is needed. Each connection has keys of its own:
a token that leaks later does not open what was recorded before.
Invariants: a connection whose other end is dead, stopped or cut off is closed within SILENCE_MS.
"""

from __future__ import annotations

from hashlib import blake2b

import zmq
from zmq.utils import z85

from baltoro.errors import ConfigError

MIN_TOKEN = 32
"""Characters: who records a handshake can try tokens at home."""
BEAT_MS, SILENCE_MS = 2000, 8000
"""How often each end is asked whether it lives; how long it may not answer."""
CONNECT_MS = 10_000
MAX_MESSAGE_BYTES = 256 << 20
NEVER_MS = 1 << 30


def check_token(token: str) -> str:
    """Errors: ConfigError for one that can be guessed, or where this pyzmq cannot encrypt."""
    if len(token) < MIN_TOKEN:
        raise ConfigError(f"a token has at least {MIN_TOKEN} characters, this one {len(token)}: use 32 random bytes")
    if not zmq.has("curve"):
        raise ConfigError("this pyzmq was built without CURVE: install the wheel of PyPI")
    return token


def as_listener(socket: zmq.Socket[bytes], token: str) -> None:
    """Before it is bound."""
    public, secret = _keys(token, b"listener")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    _limit(socket)


def as_caller(socket: zmq.Socket[bytes], token: str) -> None:
    """Before it connects. It does so once: a connection that was lost is not made again behind our back."""
    public, secret = _keys(token, b"caller")
    socket.setsockopt(zmq.CURVE_SERVERKEY, _keys(token, b"listener")[0])
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, CONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)  # with -1 what has come and was not read would be dropped
    _limit(socket)


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS - BEAT_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


def _keys(token: str, whose: bytes) -> tuple[bytes, bytes]:
    """(public, secret) of one of the ends, as text."""
    secret = z85.encode(blake2b(token.encode(), digest_size=32, person=b"baltoro " + whose[:8]).digest())
    return zmq.curve_public(secret), secret
