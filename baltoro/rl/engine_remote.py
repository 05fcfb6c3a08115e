"""An engine of another host, which `baltoro rl-engine` started there: the connection, and whether the two fit together.

In: tcp://HOST:PORT, the token of BALTORO_RL_TOKEN. Out: an `End`; refusals that say what to change.
Requests and deltas go over an encrypted connection (`transfer/secure.py`); publications over a second one, at the port
and with the key that the engine named on the first: they cannot be forged, but they can be read on the way.
Invariants: the connection is made once; when it ends, or nothing has been heard for SILENCE_MS, the engine is lost;
the engine goes on without us. The two have one checkpoint, one dtype, and options that mean the same tokens, or the run
does not begin.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from baltoro.config import environment
from baltoro.engine.config import EngineConfig
from baltoro.engine.planner import resolve_dtype
from baltoro.errors import ConfigError, TransferError
from baltoro.model.digest import weights_digest
from baltoro.protocol.worker import Detach, Shutdown
from baltoro.rl.engine_ends import let_go
from baltoro.rl.recipe import host_and_port
from baltoro.transfer.channel import Channel
from baltoro.transfer.secure import SILENCE_MS, as_caller, check_token
from baltoro.transfer.socket import call

TOKEN = "BALTORO_RL_TOKEN"
LINGER_MS = 1000
OWN_KEYS = {
    "device", "graph_batch", "overlap", "memory_bytes", "num_pages", "num_slots", "host_cache_bytes",
    "disk_cache_dir", "disk_cache_bytes", "base_path", "lora_modules", "dtype",
}  # fmt: skip
"""Fields of EngineConfig that are the engine's host's own business: where, and with how much memory. The dtype is
compared as it was resolved."""


def read_token() -> str:
    """The secret of both hosts: the variable's value, or the first line of the file that @FILE names.

    Errors: ConfigError says how to make one.
    """
    given = environment(TOKEN) or ""
    if given.startswith("@"):
        path = Path(given[1:])
        if not path.is_file():
            raise ConfigError(f"{TOKEN}: {path} does not exist")
        given = path.read_text().partition("\n")[0].strip()
    if not given:
        raise ConfigError(
            f"{TOKEN} is not set: engine and trainer on two hosts need a secret that both have. Make one with "
            f"`openssl rand -hex 32 > rl.token`, copy it to the other host, and `export {TOKEN}=@rl.token` on both"
        )
    return check_token(given)


class Remote:
    """The connection to an engine that runs elsewhere."""

    farewell: Shutdown | Detach = Detach()

    def __init__(self, address: str, token: str) -> None:
        """Begin to connect; `lost` says what came of it."""
        self.address = address
        self._failure: str | None = None
        self._is_open = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for name, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, LINGER_MS), (zmq.IPV6, 1)):
            self._socket.setsockopt(name, value)
        as_caller(self._socket, token)
        self._monitor = self._socket.get_monitor_socket()
        self._let_go = weakref.finalize(self, let_go, self._context, self._monitor, self._socket)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        for socket in (self._socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def send(self, frame: bytes) -> None:
        self._socket.send(frame)

    def wait(self, timeout_s: float) -> None:
        self._poller.poll(int(max(0.0, timeout_s) * 1000))

    def receive(self) -> bytes | None:
        return self._socket.recv() if self._socket.poll(0) else None

    def lost(self) -> str | None:
        while self._failure is None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_open = True
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED):
                self._failure = self._why()
            elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self._failure = f"{self.address} turned us away: {TOKEN} must be the same here and there"
        # what came before the end is still here, and is read first
        return None if self._socket.poll(0) else self._failure

    def _why(self) -> str:
        if self._is_open:
            ended = f"the connection to {self.address} ended, or was silent for {SILENCE_MS / 1000:g} s"
            return f"{ended}; go on with --resume once `baltoro rl-engine` runs there"
        return f"nobody listens at {self.address}: start it there with `baltoro rl-engine`"

    def channel(self, info: Mapping[str, Any], bucket_bytes: int, timeout_s: float) -> Channel:
        facts, place = info["publish"], host_and_port(self.address)
        if place is None:
            raise TransferError(f"{self.address} is no address", check="peer")
        return call(place[0], facts["port"], bytes.fromhex(facts["key"]), bucket_bytes, timeout_s=timeout_s)

    def close(self, *, was_told: bool) -> None:
        self._let_go()


def check_fit(address: str, info: Mapping[str, Any], config: EngineConfig, model_dir: str | Path) -> None:
    """Compare what the engine said of itself with what the recipe says here. Errors: ConfigError with the way out."""
    there, here = info["config"], asdict(config)
    for key in sorted(here.keys() - OWN_KEYS):
        if there.get(key) != here[key]:
            raise ConfigError(
                f"engine.options.{key} is {here[key]!r} here and {there.get(key)!r} at {address}: give both "
                "commands one recipe and the same --set"
            )
    dtype = str(resolve_dtype(config)).removeprefix("torch.")
    if info["model"]["dtype"] != dtype:
        raise ConfigError(
            f"the engine at {address} computes in {info['model']['dtype']}, the trainer here in {dtype}: set "
            "engine.options.dtype on both hosts"
        )
    digest = weights_digest(model_dir)
    if info["weights"]["digest"] != digest:
        raise ConfigError(
            f"{model_dir} here has digest {digest[:12]}, the engine at {address} serves {info['weights']['path']} with "
            f"{info['weights']['digest'][:12]}: these are two checkpoints; copy one of the folders to the other host"
        )
