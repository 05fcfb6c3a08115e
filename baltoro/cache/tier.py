"""What a tier behind the host is, and the three acts between the host and such a tier: find, spill, promote.

    device --write-back--> host slabs --spill--> tier (disk, or anything with these methods)
           <----load------            <-promote-

In: records, which are self-contained: what a prefix is called and all its bytes. Out: the same bytes or nothing.
Invariants: a tier is a cache: every answer may be "no", and nothing that goes wrong in it is an error of a request. A
record is not found before it landed. Results of background work are picked up by polling `landed()`; no tier calls
anybody back.
Source: spec/serving.md A.8, G-27.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from baltoro.cache.host import HostBook
from baltoro.cache.host_entry import HostEntry

if TYPE_CHECKING:  # the store brings torch along; a tier alone does not need it
    from baltoro.cache.host_store import HostStore


@dataclass(frozen=True, slots=True)
class TierRecord:
    """A prefix block as bytes. `parent` is empty for a first block."""

    digest: bytes
    parent: bytes
    depth: int
    block: bytes
    state: bytes | None


@dataclass(frozen=True, slots=True)
class TierEntry:
    """What a tier knows of a record without reading it."""

    digest: bytes
    parent: bytes
    depth: int
    has_state: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Landed:
    """Background work that is done. A put has no record; a get has None if the record turned out to be lost."""

    kind: Literal["put", "get"]
    digest: bytes
    is_ok: bool
    record: TierRecord | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures for people; the totals count since the start."""

    num_entries: int
    num_bytes: int
    max_bytes: int
    num_pending_bytes: int
    num_written_total: int
    num_read_total: int
    num_evicted_total: int
    num_refused_total: int
    num_bad_total: int


class Tier(Protocol):
    """Where the host spills to. Single caller: the thread of the scheduler."""

    def lookup(self, digest: bytes) -> TierEntry | None:
        """The record's outline if it has landed. Touches nothing."""

    def is_landing(self, digest: bytes) -> bool:
        """Whether the record is being written, so that lookup() may find it soon."""

    def touch(self, digest: bytes) -> None:
        """It was of use; harmless if it is not there."""

    def put(self, record: TierRecord) -> bool:
        """Keep a record and wait until it has landed; whether it is there now."""

    def get(self, digest: bytes) -> TierRecord | None:
        """Read a record and wait for it."""

    def put_later(self, record: TierRecord) -> bool:
        """Keep a record some time soon; False if there is no room for that now."""

    def prefetch(self, digest: bytes) -> bool:
        """Read a record some time soon: it comes out of landed(). False if it is not there or too much is pending."""

    def landed(self) -> list[Landed]:
        """What was finished since the last call, in order. Never waits."""

    def drop(self, digest: bytes) -> bool:
        """Forget a record; False if there is none."""

    def clear(self) -> int:
        """Forget all records; how many there were."""

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Finish what is pending and let go of everything."""


Source = Literal["host", "tier"]


@dataclass(frozen=True, slots=True)
class Chain:
    """Where the blocks of a prefix lie, from its first digest on. `num_usable`: how many reach the last state."""

    sources: tuple[Source, ...]
    num_usable: int


def find_chain(digests: Sequence[bytes], host: HostBook, tier: Tier | None) -> Chain:
    """The longest unbroken run of `digests` on the host and in the tier together.

    The host is named where it has all there is; the tier where it alone has the block, or the state that goes with it.
    A hit of a model with states is `num_usable`: KV beyond the last state cannot be used. Nothing is touched.
    """
    sources: list[Source] = []
    num_usable = 0
    for digest in digests:
        near = host.lookup(digest)
        far = tier.lookup(digest) if tier is not None else None
        if near is None and far is None:
            break
        has_near_state = near is not None and near.state is not None
        has_far_state = far is not None and far.has_state
        sources.append("tier" if near is None or (has_far_state and not has_near_state) else "host")
        if has_near_state or has_far_state:
            num_usable = len(sources)
    return Chain(tuple(sources), num_usable)


def spill(entries: Iterable[HostEntry], store: HostStore, tier: Tier | None) -> None:
    """Hand what the host gave up to the tier. Called right after HostBook.reserve, before anything writes to the slabs
    of `entries`; the bytes are copied here, unless the tier has them."""
    if tier is None:
        return
    for entry in entries:
        known = tier.lookup(entry.digest)
        if known is not None and (known.has_state or entry.state is None):
            tier.touch(entry.digest)
            continue
        block = bytes(store.block_bytes(entry.block))
        state = None if entry.state is None else bytes(store.state_bytes(entry.state))
        tier.put_later(TierRecord(entry.digest, entry.parent, entry.depth, block, state))


def promote(record: TierRecord, host: HostBook, store: HostStore, tier: Tier | None) -> bool:
    """Bring a record that was read from `tier` to the host, where it is found at once; False if there is no room.

    What has to give way is spilled. Only slabs that no copy in flight knows of are written to.
    """
    ticket = host.reserve(record.digest, record.parent, record.depth, record.state is not None)
    spill(ticket.spilled, store, tier)
    entry = ticket.entry
    if entry is None:
        return False
    if ticket.needs_block:
        store.block_bytes(entry.block)[:] = record.block
    if ticket.needs_state and record.state is not None:
        assert entry.state is not None
        store.state_bytes(entry.state)[:] = record.state
    host.land(ticket)
    return True
