"""New versions of one adapter, brought through a channel while the engine works: the receiving end of RL's publish.

A thread listens at a path, takes one transfer at a time, and checks every byte of it beside the version that serves.
Only the change of versions is made by the engine's own thread, between two steps (`gate.py`): that is the pause.

    this thread                                      the engine's thread
    Prepare, buckets, verify, put together    |      step, step, step, ...
    install: hand it over, wait               |  ->  (between two steps) new version, new namespace
    Committed                                 |      step, with the new version for new requests

In: transfers as `transfer.transaction` has them. Out: versions in the engine's AdapterBook, with the manifest's number.
Invariants: the version that serves is untouched until every byte of the new one was verified; nothing is aborted by an
update; a transfer that fails, its sender's death included, leaves the old version serving and the next one welcome.
Source: spec/training.md A.7, B.2 (7, 10, 12, 13, 18), G.1.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from baltoro.engine.engine import Engine
from baltoro.engine.gate import Gate
from baltoro.errors import ConfigError, RequestError, TransferError, UserError
from baltoro.model.adapter import adapter_from_tensors
from baltoro.observe import log, logger
from baltoro.transfer.channel import Accepts, Channel
from baltoro.transfer.local import DEFAULT_BUCKET_BYTES, Listener
from baltoro.transfer.manifest import Kind, Manifest, raws
from baltoro.transfer.tensors import to_tensor
from baltoro.transfer.transaction import DEFAULT_TIMEOUT_S, Receiver

LOOK_S = 0.1
"""How often the thread looks whether the engine leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """Where versions come from, and what they are.

    path      of the Unix socket to listen at; empty where a listener is given
    name      of the adapter
    fields    of its adapter_config.json: rank, alpha and the like, the same for every version
    expected  names, dtypes and shapes of a version; None accepts what the model has sites for
    running   what becomes of requests that run when a version arrives: they keep theirs to their end, or are carried
              over: their next token comes from the new one, what they have computed stays
    must_change   refuse a version that is the one before, bit for bit
    """

    path: str = ""
    name: str = "policy"
    fields: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Kind] | None = None
    running: Literal["keep", "carry"] = "keep"
    must_change: bool = True
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


class AdapterTarget:
    """Where a version is installed. Single writer: its Receiver's thread."""

    def __init__(self, engine: Engine, gate: Gate, options: PublishOptions, is_leaving: threading.Event) -> None:
        self.expected = options.expected
        serves = engine.adapters.latest(options.name)  # of a trainer before; 0 is the base
        self.version = 0 if serves is None else serves.number
        self._engine, self._gate, self._options, self._is_leaving = engine, gate, options, is_leaving

    def stage(self, manifest: Manifest) -> memoryview:
        return torch.empty(manifest.num_bytes, dtype=torch.uint8).numpy().data

    def pause(self) -> None:
        """Nothing to do here: the engine's thread makes the change itself, and starts no step meanwhile."""

    def install(self, manifest: Manifest, staged: memoryview) -> None:
        """Put the adapter together, then have it made the one that serves. Errors: TransferError(install)."""
        options, engine = self._options, self._engine
        try:
            tensors = {name: to_tensor(raw) for name, raw in raws(manifest, staged).items()}
            weights = adapter_from_tensors(tensors, options.fields, engine.model_config)
            engine.check_adapter(weights)
            digest = weights.digest()

            def change() -> None:
                if self._is_leaving.is_set():
                    raise RequestError("whom this version is for has left")
                is_carrying = options.running == "carry"
                engine.publish(options.name, manifest.version, weights, digest, is_carrying=is_carrying)

            self._gate.call(change, timeout_s=options.timeout_s)
        except UserError as error:
            raise TransferError(str(error), check="install") from error
        self.version = manifest.version

    def resume(self) -> None:
        """The engine was never stopped."""


class Publisher:
    """The thread that listens. `start`, then `close`."""

    def __init__(self, engine: Engine, gate: Gate, options: PublishOptions, listener: Accepts | None = None) -> None:
        """`listener`: closed with this; default: at the path of the options. Errors: ConfigError if the engine has no
        adapter slots."""
        if engine.bank is None:
            raise ConfigError("versions can only be published to an engine with adapter slots: give max_loras")
        self._options = options
        self._is_leaving = threading.Event()
        self._target = AdapterTarget(engine, gate, options, self._is_leaving)
        self._listener: Accepts = listener or Listener(options.path)
        self._last: Manifest | None = None
        self._thread = threading.Thread(target=self._listen, name="publish", daemon=True)

    @property
    def name(self) -> str:
        """Of the adapter."""
        return self._options.name

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take nothing more. A transfer under way is given up within its time limit, by its sender's end."""
        self._is_leaving.set()
        self._thread.join(2 * LOOK_S)
        self._listener.close()

    def _listen(self) -> None:
        while not self._is_leaving.is_set():
            try:
                channel = self._listener.accept(self._options.bucket_bytes, timeout_s=LOOK_S)
            except TransferError as error:
                if error.check != "timeout":  # nobody came
                    log(logger("engine"), "a sender was turned away", why=str(error))
                continue
            except OSError:
                return  # closed
            with closing(channel):
                self._serve(channel)

    def _serve(self, channel: Channel) -> None:
        """Transfers of one sender, until it goes."""
        receiver = Receiver(channel, self._target, must_change=self._options.must_change)
        receiver.installed = self._last
        while channel.is_open and not self._is_leaving.is_set():
            try:
                if channel.poll(timeout_s=LOOK_S):
                    self._last = receiver.receive(idle_s=self._options.timeout_s, timeout_s=self._options.timeout_s)
            except TransferError as error:
                if receiver.has_begun:  # else the sender just went
                    log(
                        logger("engine"),
                        "no new version",
                        check=error.check,
                        why=str(error),
                        serves=self._target.version,
                    )
