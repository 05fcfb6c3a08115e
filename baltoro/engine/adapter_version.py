"""One load of one adapter, as the engine's rooms hand it around, and its way into a slot of the device.

Invariants: a version has a namespace of its own, which holds its name, its number and its content's digest: no prefix
of another version is ever found under it.
Single writer: AdapterBook (`adapters.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from baltoro.model.adapter import Adapter


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One load of one name. Single writer: AdapterBook.

    weights    the host copy; None once it was dropped
    source     where it came from, as told to clients
    num_users  requests that have not ended
    """

    name: str
    number: int
    digest: str
    rank: int
    num_bytes: int
    source: str
    weights: Adapter | None
    num_users: int = 0
    is_retired: bool = False
    last_used: int = 0

    @property
    def namespace(self) -> str:
        """What tells its prefixes from those of every other version."""
        return f"{self.name}@{self.number}:{self.digest}"

    @property
    def is_gone(self) -> bool:
        """Whether nobody can use it any more."""
        return self.is_retired and not self.num_users

    def facts(self) -> dict[str, object]:
        """For clients."""
        is_here = self.weights is not None
        return {
            "version": self.number,
            "digest": self.digest,
            "rank": self.rank,
            "num_bytes": self.num_bytes,
            "path": self.source,
            "num_users": self.num_users,
            "is_on_host": is_here,
        }


@dataclass(frozen=True, slots=True)
class Install:
    """Copy a version into an adapter slot before the layers run."""

    slot: int
    weights: Adapter
