"""Ways down the prefix tree: along token ids, edge by edge.

In: a node, ids. Out: the nodes passed, and the pages that hold them. Nothing is written.
One slice and one look-up an edge: matching 100,000 tokens at endpoints every 64 is 1,563 of them.
"""

from __future__ import annotations

from array import array

from baltoro.cache.node import ID_BYTES, Node


def path_below(node: Node, ids: array[int], depth: int, endpoint: int) -> tuple[list[Node], int]:
    """Nodes below `node` on the way of `ids`, none deeper than `depth`; how many of them lead to the deepest state."""
    path: list[Node] = []
    num_to_state, width, children = 0, endpoint * ID_BYTES, node.children
    end = depth - depth % endpoint
    raw = ids[node.depth : end].tobytes()
    for start in range(0, len(raw) - width + 1, width):
        child = children.get(raw[start : start + width])
        if child is None:
            break
        path.append(child)
        if child.state is not None:
            num_to_state = len(path)
        children = child.children
    return path, num_to_state


def pages_of(path: list[Node], page_size: int, endpoint: int) -> tuple[int, ...]:
    """Pages of a whole path from the root, in order of position.

    Where a page is longer than an edge several nodes name one for the same positions, and not always the same one;
    the deepest node's page has all their rows.
    """
    if page_size <= endpoint:
        return tuple([page for node in path for page in node.pages])
    num_nodes = page_size // endpoint
    ends = [*range(num_nodes, len(path), num_nodes), len(path)]
    return tuple([path[end - 1].pages[0] for end in ends])


def states_above(node: Node) -> list[Node]:
    """Nodes above `node` that have a state, the shallowest first."""
    path, above = [], node.parent
    while above is not None:
        if above.state is not None:
            path.append(above)
        above = above.parent
    return path[::-1]
