"""One node of the prefix tree: what is known about a prefix that ends at a hash endpoint, and the prefix's digest.

In: a namespace and token ids. Out: nodes and digests.
An edge is the tokens between two neighbouring endpoints, as the bytes of their int64 ids; a child is found by its
edge. A digest is the blake2b of the parent's digest and the edge, so that equal digests mean equal prefixes, in one
process or in several; the root's digest is that of the namespace.
Invariants: a node's depth is its parent's plus one endpoint; a state lies on the node whose depth it has.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

from baltoro.cache.retention import CheckpointKind

ID_BYTES = 8  # array("q")
DIGEST_BYTES = 16


@dataclass(slots=True)
class Space:
    """A namespace: prefixes of different ones never meet. `is_dropped`: no longer to be found, only to be unpinned."""

    name: bytes
    is_dropped: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """A prefix of `depth` tokens. Single writer: `NodeStore`.

    `pages`: those that hold the tokens of its edge; one if a page is longer than an edge, and that one then holds all
    rows from its start to `depth`. `state`: slot of the state after `depth` tokens. `pins` counts receipts that keep
    the node, `state_pins` those of them that keep the state too. A root has no parent, no edge and depth 0.
    """

    space: Space
    parent: Node | None
    edge: bytes
    depth: int
    digest: bytes
    pages: tuple[int, ...]
    serial: int
    children: dict[bytes, Node] = field(default_factory=dict)
    state: int | None = None
    kind: CheckpointKind = "prefill"
    is_tombstone: bool = False
    is_alive: bool = True
    pins: int = 0
    state_pins: int = 0
    last_used: int = 0

    @property
    def is_fork(self) -> bool:
        return len(self.children) > 1

    @property
    def is_state_pinned(self) -> bool:
        return self.state_pins > 0


def root_digest(namespace: bytes) -> bytes:
    """Digest of the empty prefix. Names are hashed under a label of their own: none looks like a longer prefix."""
    return blake2b(namespace, digest_size=DIGEST_BYTES, person=b"namespace").digest()


def edge_digest(parent: bytes, edge: bytes) -> bytes:
    """Digest of the prefix that goes one edge beyond `parent`'s."""
    return blake2b(parent + edge, digest_size=DIGEST_BYTES).digest()


def chain_digests(parent: bytes, ids: array[int], endpoint: int, first_depth: int, last_depth: int) -> list[bytes]:
    """Digests of the endpoints d with first_depth < d <= last_depth; `parent` is the one of first_depth."""
    digests, width = [], endpoint * ID_BYTES
    count = max(0, last_depth - first_depth) // endpoint
    raw = ids[first_depth : first_depth + count * endpoint].tobytes()
    for start in range(0, len(raw) - width + 1, width):
        parent = edge_digest(parent, raw[start : start + width])
        digests.append(parent)
    return digests
