"""`Engine.audit` adds up tree and host tier too, and knows who holds each receipt."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from baltoro.engine.engine import Engine
from baltoro.errors import LeakError
from tests.engine.stub import make_engine, run, submit


def _lose_a_receipt_of_the_tree(engine: Engine) -> None:
    cache = engine.scheduler.memory.cache
    assert cache is not None
    cache.tree.pin(cache.tree.match(b"", array("q"), 0))


def _miscount_nodes(engine: Engine) -> None:
    assert engine.scheduler.memory.cache is not None
    engine.scheduler.memory.cache.tree.store.counts.nodes += 1


def _lose_a_ticket_of_the_host(engine: Engine) -> None:
    cache = engine.scheduler.memory.cache
    assert cache is not None and cache.tier is not None
    cache.tier.book.reserve(b"nobody's", b"", 4, False)


def _lose_a_block_of_the_host(engine: Engine) -> None:
    cache = engine.scheduler.memory.cache
    assert cache is not None and cache.tier is not None
    cache.tier.book._free_blocks.pop()


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_lose_a_receipt_of_the_tree, "1 receipts of the prefix tree are out, requests hold 0"),
        (_miscount_nodes, "nodes are counted"),
        (_lose_a_ticket_of_the_host, "host pins and tickets are out"),
        (_lose_a_block_of_the_host, "host blocks"),
    ],
)
def test_what_does_not_add_up_is_named(damage: Callable[[Engine], None], what: str) -> None:
    engine = make_engine(prefix_cache=True, hash_endpoint=4, track_interval=4, host_cache_bytes=20000)
    submit(engine, "a", range(20))
    run(engine)
    engine.audit()
    damage(engine)
    with pytest.raises(LeakError, match=what):
        engine.audit()
