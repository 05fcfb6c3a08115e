"""A Policy whose engine runs in this process: small runs that repeat bit for bit, and tests.

In: a model, an EngineConfig with an adapter slot. Out: the calls of `rl/policy.py`.
The engine steps only while somebody polls. Adapters go through manifest and checks, and through the engine's own book
of versions, but over no channel: a run that is to prove the transport uses `rl/engine_process.py`.
Invariants: engine and trainer have models of their own, so that a check between them means something.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baltoro.engine.engine import Engine
from baltoro.engine.pressure import Pressure, pressure
from baltoro.errors import ConfigError, RequestError
from baltoro.model.adapter import adapter_from_tensors
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import Submit
from baltoro.transfer.manifest import Kind, Manifest, Raw, check, describe
from baltoro.transfer.tensors import to_tensor
from baltoro.transfer.transaction import Receipt

NAME = "policy"


class InlinePolicy:
    """See the module. Single writer: its caller."""

    def __init__(
        self,
        engine: Engine,
        fields: Mapping[str, Any],
        *,
        expected: Mapping[str, Kind] | None = None,
        must_change: bool = True,
    ) -> None:
        """`fields`: of adapter_config.json; `expected`: what every version must hold."""
        if engine.bank is None:
            raise ConfigError("a policy needs an engine with an adapter slot: engine.options.max_loras of 1 or more")
        self.engine = engine
        self.version = 0
        self.is_asleep = False
        self._fields, self._expected, self._must_change = fields, expected, must_change
        self._manifest: Manifest | None = None
        self._versions: dict[str, int] = {}
        self._ready: list[TokenDelta] = []
        self._numbers = itertools.count()

    def submit(self, submit: Submit) -> None:
        adapter = NAME if self.version else None
        try:
            self.engine.add(msgspec.structs.replace(submit, adapter=adapter))
            self._versions[submit.request_id] = self.version
        except RequestError as error:
            delta = TokenDelta(request_id=submit.request_id, finish_reason="error", error=str(error))
            self._ready.append(delta)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def poll(self, timeout_s: float) -> list[TokenDelta]:
        """One step, if there is work; the time is what the step takes."""
        found, self._ready = self._ready, []
        if self.engine.has_work and not self.is_asleep:
            found += [self._signed(delta) for delta in self.engine.step()]
        return found

    def pressure(self) -> Pressure:
        return pressure(self.engine.scheduler)

    def publish(self, version: int, tensors: Mapping[str, Raw]) -> Receipt:
        """Errors: TransferError with the check; the old version serves on."""
        manifest = describe(version, tensors)
        check(
            manifest,
            expected=self._expected,
            before=self._manifest,
            version=self.version or -1,
            must_change=self._must_change,
        )
        copies = {name: to_tensor(raw).clone() for name, raw in tensors.items()}
        self.engine.load_adapter(NAME, adapter_from_tensors(copies, self._fields, self.engine.model_config))
        self._manifest, self.version = manifest, version
        return Receipt(manifest, 0, 0.0)

    def sleep(self) -> None:
        """Stands still; the pool stays."""
        self.is_asleep = True

    def wake(self) -> None:
        self.is_asleep = False

    def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
        """Logprobs of `output_ids`. Other requests go on meanwhile, and are told by the next poll."""
        name = f"score-{next(self._numbers)}"
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
        salt = f"{name}@{self.version}"  # computed anew
        self.submit(
            Submit(
                request_id=name, token_ids=(*prompt_ids, *output_ids), params=params, priority=1 << 20, cache_salt=salt
            )
        )
        own: list[TokenDelta] = []
        while not any(delta.finish_reason for delta in own):
            deltas = self._ready + [self._signed(delta) for delta in self.engine.step()]
            own += [delta for delta in deltas if delta.request_id == name]
            self._ready = [delta for delta in deltas if delta.request_id != name]
        if own[-1].error is not None:
            raise RequestError(own[-1].error)
        scores = next(delta.prompt_logprobs for delta in own if delta.prompt_logprobs is not None)
        return [0.0 if one is None else one for one in scores[len(prompt_ids) :]]

    def close(self) -> None:
        self.engine.close()

    def _signed(self, delta: TokenDelta) -> TokenDelta:
        """A request keeps the version that it began with."""
        version = self._versions.get(delta.request_id, self.version)
        if delta.finish_reason is not None:
            self._versions.pop(delta.request_id, None)
        return msgspec.structs.replace(delta, version=version)
