"""Puts the memory of an engine together: arena, books, ledger, prefix tree, and what adapters and windows need.

In: what was asked (EngineConfig) and what was decided (MemoryPlan). Out: the Pool that the runner moves bytes in, and
the Memory that the scheduler keeps books with; adapter slots in the model, records of draft windows.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch

from baltoro.cache.books import Books, FixedBooks
from baltoro.cache.disk import DiskTier
from baltoro.cache.host import HostBook
from baltoro.cache.host_store import HostStore
from baltoro.cache.pool import Pool
from baltoro.cache.prefix import PrefixTree
from baltoro.cache.retention import retention_by_name
from baltoro.cache.shape import ArenaLayout, ArenaShape, UnifiedShape
from baltoro.cache.unified import UnifiedBooks
from baltoro.cache.windows import WindowRecords
from baltoro.engine.config import EngineConfig
from baltoro.engine.ledger import Ledger
from baltoro.engine.memory import Memory
from baltoro.engine.planner import MemoryPlan, arena_layout, plan_grid, unified_shape
from baltoro.engine.prefix import PrefixCache
from baltoro.engine.runner import Model
from baltoro.engine.tiers import HostTier
from baltoro.errors import ConfigError
from baltoro.model.decoder import K3Model
from baltoro.model.lora import AdapterBank, add_adapters

MAX_FIXED_SLOTS = 4
"""Adapter slots whose terms are computed for all rows; with more, products with zeros cost more than asking."""
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


def add_bank(model: Model, config: EngineConfig) -> AdapterBank | None:
    """Adapter slots in every site of the model; None if no adapters are wanted. Errors: ConfigError."""
    if not config.max_loras:
        return None
    if not isinstance(model, K3Model):
        raise ConfigError("max_loras: this model has no place for adapters")
    return add_adapters(model, config.max_loras, config.max_lora_rank, has_experts=config.lora_experts)


def window_records(model: Model, config: EngineConfig, dtype: torch.dtype) -> WindowRecords | None:
    """Room for the inputs of draft windows; None if none are verified. Errors: ConfigError."""
    if not config.verify_window:
        return None
    if not isinstance(model, K3Model):
        raise ConfigError("verify_window: this model verifies no windows")
    shape = model.config
    return WindowRecords(
        len(shape.kda_layers), config.max_running, config.verify_window,
        heads=shape.kda_num_heads, dim=shape.kda_head_dim, dtype=dtype, device=config.device,
    )  # fmt: skip


def num_fixed_slots(model: Model, config: EngineConfig) -> int:
    """Slots of the bank where terms of adapters are had in fixed form: on a GPU, where asking which rows have which
    adapter waits for the device, for few slots and small experts."""
    if config.device == "cpu" or config.max_loras > MAX_FIXED_SLOTS or not isinstance(model, K3Model):
        return 0
    most = max(config.max_batch_tokens, config.max_running * config.verify_window)
    return config.max_loras if model.can_fix_adapters(most) else 0
