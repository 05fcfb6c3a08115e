"""Adds the prefix tree up: its nodes against each other, its counts against its nodes.

In: the nodes' store, the grid, the number of receipts that are out. Out: faults in words; none if all is well.
What the tree holds in the books is compared with the books by `audit.py`; this is about the tree itself.
"""

from __future__ import annotations

from collections import Counter

from baltoro.cache.node import Node, edge_digest, root_digest
from baltoro.cache.node_store import NodeStore, descendants


def tree_faults(store: NodeStore, step: int, num_receipts: int) -> list[str]:
    """What is wrong, in words. `step`: the grid that states stand on; `num_receipts`: pins of nodes that are out."""
    faults = []
    nodes: list[Node] = []
    for root in [*store.roots.values(), *store.dropped]:
        below = list(descendants(root))
        nodes += below
        if root.digest != root_digest(root.space.name) or root.depth or root.state is not None or root.pins:
            faults.append(f"the root of {root.space.name!r} is not empty")
        if not below:
            faults.append(f"the root of {root.space.name!r} has no children and is still kept")
    leaves, states = store.leaves.entered(), store.states.entered()
    for node in nodes:
        found = _node_faults(node, store, step)
        if not node.children and not node.pins and node.serial not in leaves:
            found.append("it could be removed and is not among those that can")
        if node.state is not None and not node.state_pins and node.serial not in states:
            found.append("its state could go and is not among those that can")
        faults += [f"node {node.digest.hex()} of depth {node.depth}: {fault}" for fault in found]
    for name, counted, there in (
        ("nodes", store.counts.nodes, len(nodes)),
        ("states", store.counts.states, sum(node.state is not None for node in nodes)),
        ("tombstones", store.counts.tombstones, sum(node.is_tombstone for node in nodes)),
        ("receipts", num_receipts, sum(node.pins for node in nodes)),
    ):
        if counted != there:
            faults.append(f"{counted} {name} are counted, {there} are there")
    if store.page_counts != Counter(page for node in nodes for page in node.pages):
        faults.append("the counts of nodes per page are wrong")
    return faults


def _node_faults(node: Node, store: NodeStore, step: int) -> list[str]:
    parent, faults = node.parent, []
    if parent is None or not node.is_alive or parent.children.get(node.edge) is not node:
        return ["its parent does not know it"]
    if node.depth != parent.depth + store.endpoint:
        faults.append(f"it is {node.depth - parent.depth} tokens below its parent")
    if node.digest != edge_digest(parent.digest, node.edge):
        faults.append("its digest is not that of its tokens")
    if node.state is not None and (node.depth % step or node.is_tombstone):
        faults.append("its state is off the grid, or marked as evicted")
    if not 0 <= node.state_pins <= node.pins or (node.state_pins and node.state is None):
        faults.append(f"{node.pins} receipts, {node.state_pins} of them for its state {node.state}")
    is_idle = not node.children and not node.pins
    if is_idle and (node.space.is_dropped or (not store.has_pages and node.state is None)):
        faults.append("nothing keeps it")
    return faults
