"""What an engine tells about itself in numbers, for `/server_info` and `/metrics`. All in one place.

In: books, tree, tiers, counts. Out: a flat dict of whole numbers and shares.
Invariants: nothing is changed by asking; what an engine does not have (a cache, a host tier, a disk tier) has no keys.
Which of them only grow, and what each means: `server/engine_numbers.py`.
"Used" is what requests hold; what only the prefix cache holds is "evictable": it gives way whenever a request needs it.
In a unified pool pages and slots share one arena: "available" of each says how many could be had if only that kind were
taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from baltoro.cache.tier import TierStats
from baltoro.engine.memory import Memory
from baltoro.engine.planner import MemoryPlan
from baltoro.engine.prefix import PrefixCache
from baltoro.engine.pressure import pressure
from baltoro.engine.request import Request
from baltoro.engine.scheduler import Scheduler
from baltoro.engine.tiers import HostTier

Numbers = dict[str, float]


def engine_numbers(scheduler: Scheduler, plan: MemoryPlan) -> Numbers:
    """Everything. The first keys tell the two limits that decide whether a request can run: tokens of KV, and slots."""
    counts, memory = scheduler.counts, scheduler.memory
    return {
        "num_running_reqs": len(scheduler.running),
        "num_queue_reqs": len(scheduler.waiting),
        "max_running_reqs": scheduler.max_running,
        "pool_pressure": pressure(scheduler).pool_share,
        **_memory_numbers(memory, plan, scheduler.roster.holders()),
        "num_retracted_reqs": counts.retractions,
        "num_steps": counts.steps,
        "prompt_tokens": counts.prompt_tokens,
        "generation_tokens": counts.output_tokens,
        "num_finished_reqs": counts.finished,
        "num_aborted_reqs": counts.aborted,
        "policy_version": scheduler.policy_version,
        **({} if memory.cache is None else _cache_numbers(memory.cache)),
    }


def _memory_numbers(memory: Memory, plan: MemoryPlan, holders: Sequence[Request]) -> Numbers:
    """Pages and slots by who holds them."""
    books, size = memory.books, memory.page_size
    pages, slots = books.pages, books.slots
    num_pages = len({page for request in holders for page in request.pages})
    num_slots = sum(_num_slots(request) for request in holders)
    used_bytes = num_pages * plan.page_bytes + num_slots * plan.slot_bytes
    return {
        "token_usage": used_bytes / plan.arena_bytes if plan.arena_bytes else 0.0,
        "full_token_usage": num_pages / pages.count if pages.count else 0.0,
        "mamba_usage": num_slots / slots.count if slots.count else 0.0,
        "max_total_num_tokens": pages.count * size,
        "kv_used_tokens": num_pages * size,
        "kv_evictable_tokens": (pages.num_used - num_pages) * size,
        "kv_available_tokens": pages.num_free * size,
        "max_total_num_slots": slots.count,
        "slots_held": num_slots,
        "slots_evictable": slots.num_used - num_slots,
        "slots_available": slots.num_free,
        "pages_used": pages.num_used,
        "slots_used": slots.num_used,
        "num_moves": books.num_moves,
    }


def _num_slots(request: Request) -> int:
    """The working slot, and those of snapshots on their way."""
    hold = request.hold
    return (request.slot is not None) + len(hold.due) + (hold.tracked is not None)


def _cache_numbers(cache: PrefixCache) -> Numbers:
    tree, counts = cache.tree.stats(), cache.counts
    return {
        "cache_lookup_tokens": counts.lookup_tokens,
        "cache_hit_tokens": counts.hit_tokens,
        "cache_hit_rate": counts.hit_tokens / counts.lookup_tokens if counts.lookup_tokens else 0.0,
        "cache_tokens": tree.num_tokens,
        "cache_states": tree.num_states,
        "cache_tombstones": tree.num_tombstones,
        "cache_evicted_tokens": tree.num_evicted_nodes * cache.grid.endpoint,
        "cache_evicted_states": tree.num_evicted_states,
        "cache_superseded": tree.num_superseded,
        "num_snapshots": counts.snapshots,
        "num_skipped_snapshots": counts.skipped_snapshots,
        **({} if cache.tier is None else _host_numbers(cache.tier)),
        **({} if cache.tier is None else {"num_backups": counts.backups}),
    }


def _host_numbers(tier: HostTier) -> Numbers:
    book, endpoint = tier.book.stats(), tier.store.endpoint
    return {
        "host_entries": book.num_entries,
        "host_pinned": book.num_pinned,
        "host_tokens": book.num_blocks_used * endpoint,
        "host_max_tokens": book.num_blocks * endpoint,
        "host_states": book.num_states_used,
        "host_max_states": book.num_states,
        "host_written_total": book.num_landed_total,
        "host_spilled_total": book.num_spilled_total,
        "host_refused_total": book.num_refused_total,
        "host_loaded_tokens": tier.num_loaded_tokens,
        **({} if tier.third is None else _disk_numbers(tier.third.stats())),
    }


def _disk_numbers(disk: TierStats) -> Numbers:
    return {
        "disk_entries": disk.num_entries,
        "disk_bytes": disk.num_bytes,
        "disk_max_bytes": disk.max_bytes,
        "disk_pending_bytes": disk.num_pending_bytes,
        "disk_written_total": disk.num_written_total,
        "disk_read_total": disk.num_read_total,
        "disk_evicted_total": disk.num_evicted_total,
        "disk_refused_total": disk.num_refused_total,
        "disk_bad_total": disk.num_bad_total,
    }
