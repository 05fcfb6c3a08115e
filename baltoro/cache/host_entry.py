"""What the books of the host tier hand out: an entry, room that was made for one, a receipt, figures.

Invariants: frozen; a Reserved is closed exactly once, by land() or cancel(), a HostPin by unpin() (`host.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostEntry:
    """What lies on the host under `digest`: the rows [depth - E, depth), and the state after `depth` if there is one.

    `parent` is the digest of the block before; empty for a first block and for keys that belong to no chain.
    """

    digest: bytes
    parent: bytes
    depth: int
    block: int
    state: int | None


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room that was made. `entry` is None if there is none: everything is pinned or in flight.

    needs_block, needs_state  what has to be copied before land(); both False if all of it is there, or on its way
    spilled  what gave way. Its slabs may be written to by the very copy that this is for: read them before
    number   tells tickets apart
    """

    entry: HostEntry | None
    needs_block: bool = False
    needs_state: bool = False
    spilled: tuple[HostEntry, ...] = ()
    number: int = 0


@dataclass(frozen=True, slots=True)
class HostPin:
    """Receipt of pin()."""

    number: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class HostStats:
    """Figures for people; the totals count since the start."""

    num_entries: int
    num_blocks: int
    num_blocks_used: int
    num_states: int
    num_states_used: int
    num_pinned: int
    num_landed_total: int
    num_spilled_total: int
    num_refused_total: int
