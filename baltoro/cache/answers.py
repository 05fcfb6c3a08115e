"""What the prefix tree hands out: what it knows of a prompt, receipts, what an insertion did, figures.

Invariants: frozen; a Match is right until the tree is next written to, unless it is pinned; a Pin is given back exactly
once, to the tree that made it.
"""

from __future__ import annotations

from dataclasses import dataclass

from baltoro.cache.node import Node


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree knows of a prompt; right until the tree is next written to, unless pinned.

    `depth`: tokens that can be restored, `state` the slot to start from (None: start from nothing, or no states in
    this model), `pages` those of [0, depth). `kv_depth`: how far KV goes. `branch`: depth at which this request should
    plant a checkpoint because others have been there, 0 if nowhere.
    """

    namespace: bytes
    depth: int
    kv_depth: int
    state: int | None
    pages: tuple[int, ...]
    branch: int
    digest: bytes
    node: Node | None


@dataclass(frozen=True, slots=True)
class Pin:
    """A receipt: while it is out, the prefix (and with `has_state` its state) stays. Given back exactly once."""

    serial: int
    node: Node | None
    has_state: bool


@dataclass(frozen=True, slots=True)
class Inserted:
    """`num_new_tokens` entered the tree; `superseded` slots were released because the new state replaces them.

    Where `is_state_taken` is False, the slot that was offered is still the caller's.
    """

    num_new_tokens: int
    is_state_taken: bool
    superseded: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeStats:
    """Present contents, and totals since the start (`num_evicted_*`, `num_superseded`)."""

    num_nodes: int
    num_tokens: int
    num_states: int
    num_tombstones: int
    num_pins: int
    num_namespaces: int
    num_evicted_nodes: int
    num_evicted_states: int
    num_superseded: int
