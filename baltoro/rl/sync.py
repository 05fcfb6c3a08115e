"""Export the adapter, bring it to the engine, and be sure that it is the one.

In: an Adapter, a version. Out: a SyncRecord; the engine serves the version afterwards.
Invariants: at the first version every B is zero, so the first publication changes no answer; later ones have the same
tensors, and at least one of them differs unless the run says that none may (rate 0); what the engine installed has the
digest of what was exported; a publication that fails leaves the version before it, here and there.
Source: spec/training.md A.7, A.8, B.2 (7, 8, 9).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baltoro.errors import DigestMismatch, InvariantError
from baltoro.model.adapter import Adapter
from baltoro.model.config import K3Config
from baltoro.rl.policy import Policy
from baltoro.transfer.manifest import Kind, Manifest, Raw, describe
from baltoro.transfer.tensors import to_raws


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """What a publication was. `num_changed`: tensors that differ from the version before."""

    version: int
    num_bytes: int
    num_buckets: int
    seconds: float
    num_tensors: int
    num_changed: int
    digest: str


class Sync:
    """Publications of one run, in order. Single writer: the loop."""

    def __init__(self, policy: Policy, config: K3Config, *, must_change: bool = True) -> None:
        self._policy, self._config, self._must_change = policy, config, must_change
        self._before: Manifest | None = None

    def publish(self, version: int, adapter: Adapter, *, is_first: bool = False) -> SyncRecord:
        """Make `adapter` the version that new requests get.

        Errors: InvariantError where the first version changes answers, or a later one changes nothing; DigestMismatch;
        TransferError from the transfer.
        """
        if is_first:
            check_is_zero(adapter)
        tensors = export(adapter, self._config)
        manifest = describe(version, tensors)
        num_changed = self._changed(manifest)
        receipt = self._policy.publish(version, tensors)
        if receipt.manifest.digest != manifest.digest or self._policy.version != version:
            raise DigestMismatch(
                f"version {version} was exported with digest {manifest.digest[:12]}, the engine has version "
                f"{self._policy.version} with {receipt.manifest.digest[:12]}"
            )
        self._before = manifest
        return SyncRecord(
            version,
            manifest.num_bytes,
            receipt.num_buckets,
            receipt.seconds,
            len(manifest.tensors),
            num_changed,
            manifest.digest,
        )

    def _changed(self, manifest: Manifest) -> int:
        """Tensors that differ from the version before; all, if there is none."""
        if self._before is None:
            return len(manifest.tensors)
        before = {entry.name: entry.sha256 for entry in self._before.tensors}
        if before.keys() != {entry.name for entry in manifest.tensors}:
            raise InvariantError("the adapter has other tensors than its version before")
        changed = sum(entry.sha256 != before[entry.name] for entry in manifest.tensors)
        if self._must_change and not changed:
            raise InvariantError(
                f"no tensor of version {manifest.version} differs from the one before: no step arrived"
            )
        return changed


def export(adapter: Adapter, config: K3Config) -> dict[str, Raw]:
    """Factors by the names of the wire (docs/adapters.md)."""
    return to_raws(adapter.tensors(config))


def expected(adapter: Adapter, config: K3Config) -> dict[str, Kind]:
    """Names, dtypes and shapes of every version of this adapter."""
    return {name: (raw.dtype, raw.shape) for name, raw in export(adapter, config).items()}


def fields(adapter: Adapter) -> dict[str, Any]:
    """What an engine must know besides the tensors: the fields of adapter_config.json."""
    return adapter.settings.to_json(sorted({module.rpartition(".")[2] for module in adapter.factors}))


def check_is_zero(adapter: Adapter) -> None:
    """Errors: InvariantError where some B is not zero."""
    wrong = [module for module, one in adapter.factors.items() if bool(one.b.any())]
    if wrong or not adapter.factors:
        raise InvariantError(
            f"a first version must change nothing, but B is not zero in {wrong[:3] or 'no site at all'}"
        )
