"""Puts the memory of an engine together: arena, books, ledger, prefix tree.

In: what was asked (EngineConfig) and what was decided (MemoryPlan). Out: the Pool that the runner moves bytes in, and
the Memory that the scheduler keeps books with.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch

from baltoro.cache.books import Books, FixedBooks
from baltoro.cache.disk import DiskTier
from baltoro.cache.host import HostBook
from baltoro.cache.host_store import HostStore
from baltoro.cache.pool import ArenaLayout, ArenaShape, Pool, UnifiedShape
from baltoro.cache.prefix import PrefixTree
from baltoro.cache.retention import retention_by_name
from baltoro.cache.unified import UnifiedBooks
from baltoro.engine.config import EngineConfig
from baltoro.engine.ledger import Ledger
from baltoro.engine.memory import Memory
from baltoro.engine.planner import MemoryPlan, arena_layout, plan_grid, unified_shape
from baltoro.engine.prefix import PrefixCache
from baltoro.engine.runner import Model
from baltoro.engine.tiers import HostTier
from baltoro.errors import ConfigError

SAMPLE = 32
"""Values from each end of a weight that go into the fingerprint."""


def build_memory(
    config: EngineConfig, model: Model, plan: MemoryPlan, dtype: torch.dtype
) -> tuple[Pool, Memory, HostStore | None]:
    """Arena, books, and the host's slabs if there are any. Errors: ConfigError for an unknown retention policy, a host
    tier that holds nothing, a disk tier without a host tier."""
    layout = arena_layout(model.config, dtype, config.page_size, has_routes=config.keeps_routed_experts)
    shape, books = _books(config, layout, plan)
    pool = Pool(shape, config.device)
    if config.is_poisoned:
        pool.poison()
    ledger = Ledger(books, config.page_size, is_poisoned=config.is_poisoned)
    if not config.prefix_cache:
        return pool, Memory(ledger), None
    tree = _tree(config, layout, books, model.state_chunk)
    tier, store = None, None
    if config.host_cache_bytes:
        store = HostStore.for_pool(pool, config.host_cache_bytes, tree.grid.endpoint)
        book = HostBook(store.shape.num_blocks, store.shape.num_states)
        tier = HostTier(book, store, ledger, third=_disk(config, model, dtype))
    elif config.disk_cache_dir:
        raise ConfigError("a disk tier stands behind the host tier: give host_cache_bytes too")
    is_backing_up = config.retract_to == "host"
    cache = PrefixCache(tree, ledger, tree.retention, tier=tier, is_backing_up=is_backing_up)
    return pool, Memory(ledger, cache), store


def build_books(config: EngineConfig, layout: ArenaLayout, plan: MemoryPlan, *, chunk: int) -> Memory:
    """The Memory of an engine without its bytes: for replaying what it would do. Host and disk tiers are not there."""
    _, books = _books(config, layout, plan)
    ledger = Ledger(books, config.page_size)
    if not config.prefix_cache:
        return Memory(ledger)
    tree = _tree(config, layout, books, chunk)
    return Memory(ledger, PrefixCache(tree, ledger, tree.retention))


def _tree(config: EngineConfig, layout: ArenaLayout, books: Books, chunk: int) -> PrefixTree:
    grid = plan_grid(config, layout, chunk)
    return PrefixTree(
        grid,
        config.page_size,
        books,
        retention_by_name(config.retention, interval=grid.interval),
        has_states=bool(layout.slot_parts),
        has_pages=layout.row is not None,
        is_unified=config.pool == "unified",
    )


def _books(config: EngineConfig, layout: ArenaLayout, plan: MemoryPlan) -> tuple[ArenaShape | UnifiedShape, Books]:
    if config.pool == "fixed":
        fixed = ArenaShape(layout, plan.num_slots, plan.num_pages)
        return fixed, FixedBooks(fixed.first_page, fixed.num_pages, fixed.num_slots)
    shape = unified_shape(layout, plan.arena_bytes, plan.num_slots, plan.num_pages)
    return shape, UnifiedBooks(shape)


def _disk(config: EngineConfig, model: Model, dtype: torch.dtype) -> DiskTier | None:
    if not config.disk_cache_dir:
        return None
    meaning = fingerprint(model, dtype) + (b"routes" if config.keeps_routed_experts else b"")
    return DiskTier.open(Path(config.disk_cache_dir), config.disk_cache_bytes, meaning)


def fingerprint(model: Model, dtype: torch.dtype) -> bytes:
    """What gives cached bytes their meaning: the shape of the model, its dtype, and a sample of every weight, so that
    files of another checkpoint are not believed."""
    digest = blake2b(repr((model.config, dtype)).encode(), digest_size=16)
    for name, tensor in sorted(getattr(model, "state_dict", dict)().items()):
        ends = torch.cat([tensor.flatten()[:SAMPLE], tensor.flatten()[-SAMPLE:]])
        digest.update(name.encode() + ends.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.digest()
