"""A Policy whose engine is a process of its own: it owns the base, samples, and gets its adapters by real transport.

    this process (rl, trainer)                     the engine's process
    submit, abort, poll, score   -- pyzmq -->      the Worker contract of `protocol/worker.py`
    publish                      -- channel -->    engine/publish.py: a thread beside the engine's
    the base, mapped             <-- /dev/shm, CUDA IPC --   engine/base.py; of another host: each has its own

In: a model folder, an EngineConfig, what an adapter version looks like. Out: the calls of `rl/policy.py`.
An engine of another host is there before us and after us, and may have served versions of a trainer before: ours are
numbered on the wire from there on (`_before`), here from 1 as everywhere.
Invariants: no wait is without a limit; an engine that died is WorkerLost with its reason in every call from then on,
after the deltas that had come; what a child has on the machine is one private folder, removed by who lives longer.
On a GPU, where a map cannot be read-only, the base's fingerprint is taken again with every publication, at both ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import torch

from baltoro.engine.base import Base
from baltoro.engine.config import EngineConfig
from baltoro.engine.planner import check_device
from baltoro.engine.pressure import Pressure
from baltoro.engine.publish import PublishOptions
from baltoro.errors import ConfigError, RequestError, TransferError, UserError
from baltoro.llm.engine_process import engine_main
from baltoro.model.config import K3Config
from baltoro.model.decoder import K3Model
from baltoro.model.weights import load_model
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Abort, Attach, Look, Query, Sleep, Submit, Wake
from baltoro.rl.base import open_model
from baltoro.rl.engine_ends import Child
from baltoro.rl.engine_link import EngineLink
from baltoro.rl.engine_remote import Remote, check_fit, read_token
from baltoro.transfer.channel import Channel
from baltoro.transfer.local import DEFAULT_BUCKET_BYTES
from baltoro.transfer.manifest import Kind, Raw
from baltoro.transfer.transaction import DEFAULT_TIMEOUT_S, Receipt, send

FIRST = 1 << 20
"""Priority of scoring: it is one prompt, and somebody waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """What a version is, and how one is taken (`engine.publish.PublishOptions`).

    fields, expected, running, must_change   as there
    is_base_shared   put the base where the trainer maps it; off, every process loads its own, as on two hosts
    start_s, call_s  how long the engine may take to load, and to answer
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Kind] | None = None
    running: Literal["keep", "carry"] = "keep"
    must_change: bool = True
    is_base_shared: bool = True
    name: str = "policy"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    start_s: float = 600.0
    call_s: float = 60.0
    transfer_s: float = DEFAULT_TIMEOUT_S


class EnginePolicy:
    """See the module. A context manager. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        model_dir: str | Path,
        config: EngineConfig,
        options: PolicyOptions | None = None,
        *,
        entry: Callable[..., None] = engine_main,
        place: str = "process",
    ) -> None:
        """Start the engine (`entry`: what its process runs), or attach to the one at `place`, tcp://HOST:PORT, and wait
        until it is ready.

        Errors: ConfigError without adapter slots or without the device, or for an engine elsewhere that does not fit or
        has a trainer; WorkerLost if it does not start, or is not there.
        """
        check_device(config.device)
        self.options = options = options or PolicyOptions()
        if config.max_loras < 1:
            raise ConfigError("a policy is an adapter: the engine needs max_loras of 1 or more")
        self.version = 0
        self.is_asleep = False
        self.given_back: dict[str, Any] = {}
        self.model_dir, self.device = Path(model_dir), config.device
        self._before = 0
        self._ready: deque[TokenDelta] = deque()
        self._private: dict[str, list[TokenDelta]] = {}  # of scoring
        self._bases: list[Base] = []  # as long as the models on them may live
        if place == "process":
            self._link = self._start(config, entry)
        else:
            self._link = self._attach(config, place)

    def _versions(self) -> dict[str, Any]:
        """What the engine is told of our versions."""
        options = self.options
        return {
            "name": options.name,
            "fields": dict(options.fields),
            "expected": options.expected,
            "running": options.running,
            "must_change": options.must_change,
            "bucket_bytes": options.bucket_bytes,
            "timeout_s": options.transfer_s,
        }

    def _start(self, config: EngineConfig, entry: Callable[..., None]) -> EngineLink:
        child = Child()
        base_path = str(child.folder / "base") if self.options.is_base_shared else ""
        publish = PublishOptions(path=child.versions, **self._versions())
        child.start(entry, (str(self.model_dir), replace(config, base_path=base_path), child.address, publish))
        link = EngineLink(child, self._on_delta, call_s=self.options.call_s)
        link.open(None, limit_s=self.options.start_s)
        return link

    def _attach(self, config: EngineConfig, place: str) -> EngineLink:
        link = EngineLink(Remote(place, read_token()), self._on_delta, call_s=self.options.call_s)
        link.open(Attach(**self._versions()), limit_s=self.options.start_s)
        try:
            check_fit(place, link.info, config, self.model_dir)
        except UserError:
            link.close()
            raise
        self._before = _number(link.info["adapters"], self.options.name)
        return link

    @property
    def info(self) -> dict[str, Any]:
        """What the engine said of itself when it was ready: model, memory, config, base."""
        return self._link.info

    @property
    def _child(self) -> Child:
        end = self._link.end
        assert isinstance(end, Child), "the engine is on another host"
        return end

    @property
    def folder(self) -> Path:
        """Sockets and base of a child; private to this user, and gone with the engine."""
        return self._child.folder

    @property
    def process_id(self) -> int:
        """Of a child."""
        return self._child.process_id

    def trainer_model(self) -> K3Model:
        """The frozen base for the trainer: on the engine's bytes where these are shared, else a copy of its own, in the
        engine's dtype. Errors: DigestMismatch if the bytes are not those that the engine wrote."""
        dtype: torch.dtype = getattr(torch, self.info["model"]["dtype"])
        facts = self.info.get("base")
        if facts is None:
            return load_model(self.model_dir, dtype=dtype, device=self.device).requires_grad_(False)
        config = K3Config.load(self.model_dir).with_(dtype=self.info["model"]["dtype"])
        model, base = open_model(config, facts["path"], facts["digest"], dtype=dtype, device=self.device)
        self._bases.append(base)
        return model

    # ---- requests ------------------------------------------------------------------------------------------------
    def submit(self, submit: Submit) -> None:
        """Start a request with the version that serves."""
        self._link.send(msgspec.structs.replace(submit, adapter=self.options.name if self.version else None))

    def abort(self, request_id: str) -> None:
        self._link.send(Abort(request_id))

    def poll(self, timeout_s: float) -> list[TokenDelta]:
        """What there is to tell, after waiting up to `timeout_s` for the first of it."""
        self._link.take(0.0 if self._ready else timeout_s)
        if not self._ready:
            self._link.check()
        found = list(self._ready)
        self._ready.clear()
        return found

    def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
        """Logprobs of `output_ids` after `prompt_ids`, by the version that serves, computed anew (no cached prefix).

        Errors: ConfigError while the engine sleeps, RequestError for what it cannot read.
        """
        if self.is_asleep:
            raise ConfigError("the engine sleeps: wake it before scoring")
        name = self._link.name()
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
        ids = (*prompt_ids, *output_ids)
        found: list[TokenDelta] = []
        self._private[name] = found
        try:
            self.submit(Submit(request_id=name, token_ids=ids, params=params, priority=FIRST))
            self._link.until(lambda: any(d.finish_reason for d in found), self.options.call_s, "score")
        finally:
            del self._private[name]
        if found[-1].error is not None:
            raise RequestError(found[-1].error)
        scores = next(delta.prompt_logprobs for delta in found if delta.prompt_logprobs is not None)
        return [0.0 if score is None else score for score in scores[len(prompt_ids) :]]

    def pressure(self) -> Pressure:
        """Now: asks the engine, which answers between two steps."""
        return msgspec.convert(self._link.call(Look(self._link.name())).info["pressure"], Pressure)

    def stats(self) -> dict[str, Any]:
        """The engine's numbers, by the names of `/metrics`."""
        return self._link.call(Query(self._link.name())).info

    # ---- versions ------------------------------------------------------------------------------------------------
    def publish(self, version: int, tensors: Mapping[str, Raw]) -> Receipt:
        """Bring a version to the engine, which goes on working. Requests that are submitted afterwards get it.

        Errors: TransferError with the check that refused it, here or there; `version` is then what serves.
        DigestMismatch where somebody wrote to the base.
        """
        self._link.check()
        for base in self._bases:
            base.check()
        try:
            channel = self._connect()
            try:
                receipt = send(channel, self._before + version, tensors, timeout_s=self.options.transfer_s)
            finally:
                channel.close()
        except TransferError as error:
            if error.check in ("peer", "timeout"):  # it may have been installed: the answer was lost
                self.version = self._serving()
            raise
        self.version = version
        return replace(receipt, manifest=msgspec.structs.replace(receipt.manifest, version=version))

    def _connect(self) -> Channel:
        return self._link.end.channel(self.info, self.options.bucket_bytes, self.options.transfer_s)

    def _serving(self) -> int:
        """Of ours; 0 is the base."""
        facts = self._link.call(Look(self._link.name())).info["adapters"]
        return max(0, _number(facts, self.options.name) - self._before)

    # ---- memory --------------------------------------------------------------------------------------------------
    def sleep(self) -> None:
        """The engine gives its pool back (`given_back` says how much); what runs waits. May be called twice."""
        found = self._link.call(Sleep(self._link.name())).info
        if not self.is_asleep:
            self.is_asleep, self.given_back = True, found

    def wake(self) -> None:
        self._link.call(Wake(self._link.name()))
        self.is_asleep = False

    # ---- life ----------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End the engine and remove what is on the machine, or leave the one of another host. On a GPU models on its
        base must have gone before: they would read what nobody holds. May be called twice."""
        if self.device != "cpu":
            for base in self._bases:
                base.close()
            self._bases = []
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_delta(self, delta: TokenDelta) -> None:
        if self._before and delta.version:
            delta = msgspec.structs.replace(delta, version=delta.version - self._before)
        self._private.get(delta.request_id, self._ready).append(delta)


def _number(facts: object, name: str) -> int:
    """The version of adapter `name` among an engine's facts of adapters; 0 if there is none."""
    adapters = msgspec.convert(facts, dict[str, dict[str, Any]])
    return int(adapters[name]["version"]) if name in adapters else 0
