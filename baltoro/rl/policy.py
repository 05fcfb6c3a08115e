"""The policy as RL sees it: an engine that samples, scores, and takes a new adapter now and then.

In: requests of ids, adapters by the names of the wire. Out: token deltas, each of one version.
Invariants: version 0 is the base without an adapter; a version that was published is what every later request gets;
a publication that fails raises, and the version before it serves on.
Implementations: `rl/engine_process.py` (an engine in a process of its own); a double for tests in `tests/rl/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from baltoro.engine.pressure import Pressure
from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.worker import Submit
from baltoro.transfer.manifest import Raw
from baltoro.transfer.transaction import Receipt


class Policy(Protocol):
    """The engine as RL sees it. Calls return at once except publish, sleep, wake and score.

    version  of the adapter that new requests get; 0: the base without an adapter
    Errors of all: WorkerLost once the engine is gone, with the reason.
    """

    version: int

    def submit(self, submit: Submit) -> None:
        """Start a request; `Submit.adapter` is filled in here. What is wrong with it comes back as a delta."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; its last delta says so."""
        ...

    def poll(self, timeout_s: float) -> list[TokenDelta]:
        """What there is to tell, after waiting up to `timeout_s` for the first of it."""
        ...

    def pressure(self) -> Pressure:
        """How full the engine is: what `rl/throttle.py` needs."""
        ...

    def publish(self, version: int, tensors: Mapping[str, Raw]) -> Receipt:
        """Bring a new adapter to the engine. Errors: TransferError with the check; the old version serves on."""
        ...

    def sleep(self) -> None:
        """The engine gives its pool back; what runs waits. May be called twice."""
        ...

    def wake(self) -> None:
        """The engine works again. May be called twice."""
        ...

    def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
        """The engine's logprobs of given ids after a prompt."""
        ...

    def close(self) -> None:
        """End the engine. May be called twice."""
        ...
