"""What the bytes behind an engine's prefix tree must be, worked out from its tokens: the script's states and rows."""

from __future__ import annotations

from array import array

from baltoro.cache.node import Node
from baltoro.cache.node_store import descendants
from baltoro.engine.batch import Plan
from baltoro.engine.engine import Engine
from baltoro.engine.prefix import PrefixCache
from tests.engine.stub import PRIME


def cache_of(engine: Engine) -> PrefixCache:
    cache = engine.scheduler.memory.cache
    assert cache is not None
    return cache


def make_moves(engine: Engine) -> None:
    """Commit what is in flight and make the copies that are listed, as the next step would."""
    engine.loop.settle()
    memory = engine.scheduler.memory
    plan = Plan((), 0, memory.collect_moves())
    memory.freeze()
    engine.runner.run(plan)
    memory.thaw()


def nodes_of(engine: Engine) -> list[tuple[Node, list[int]]]:
    """(node, all tokens up to it) of the tree, with or without a state."""
    found = []
    for root in cache_of(engine).tree.store.roots.values():
        for node in descendants(root):
            edges, at = [node.edge], node.parent
            while at is not None and at.parent is not None:
                edges.append(at.edge)
                at = at.parent
            found.append((node, array("q", b"".join(edges[::-1])).tolist()))
    return found


def check_tree(engine: Engine) -> list[int]:
    """Every state in the tree is that of exactly the tokens of its node, every page has their rows. Out: the depths
    that have a state."""
    make_moves(engine)
    depths = []
    for node, tokens in nodes_of(engine):
        assert node.depth == len(tokens)
        _check_rows(engine, node, tokens)
        if node.state is not None:
            _check_state(engine, node.state, tokens)
            depths.append(node.depth)
    return sorted(depths)


def _check_state(engine: Engine, slot: int, tokens: list[int]) -> None:
    place, views = engine.scheduler.memory.physical_slot(slot), engine.runner.views
    for layer, (state, conv) in enumerate(zip(views.recurrent, views.conv, strict=True)):
        fold = 0
        for token in tokens:
            fold = (fold * 31 + token + layer + 1) % PRIME
        assert set(state[place].flatten().tolist()) == {fold}, f"a state of {len(tokens)} tokens is not theirs"
        taps = conv.shape[1]
        assert conv[place][:, 0].tolist() == ([0] * taps + tokens)[-taps:]


def _check_rows(engine: Engine, node: Node, tokens: list[int]) -> None:
    size, endpoint = engine.config.page_size, cache_of(engine).grid.endpoint
    first = node.depth - endpoint
    places = engine.scheduler.memory.ledger.physical_pages(node.pages).tolist()
    for layer, kv in enumerate(engine.runner.views.kv):
        rows = kv[places].flatten(0, 1)[first % size :][:endpoint, 0].tolist()
        assert rows == [token + layer + 1 for token in tokens[first:]], f"rows {first}..{node.depth} are not theirs"
