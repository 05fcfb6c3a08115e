"""What an engine would plan for a replay: an EngineConfig and a MemoryPlan from the bytes of an arena.

In: bytes, a model's shape, the kind of pool. Out: config and plan. Errors: ConfigError when no request fits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from baltoro.cache.shape import ArenaLayout, UnifiedShape
from baltoro.engine.config import EngineConfig
from baltoro.engine.planner import MemoryPlan, arena_layout, plan_memory
from baltoro.errors import ConfigError
from baltoro.model.config import K3Config

CHUNK = 64
"""Where the model has states: the chunk of the KDA kernels."""


def replay_config(model: K3Config, *, arena_bytes: int, slot_share: float = 0.5, **options: Any) -> EngineConfig:
    """Options of an engine with `arena_bytes`; of a fixed pool `slot_share` of them are for slots. Plans overlap."""
    config = EngineConfig(**({"memory_bytes": arena_bytes, "overlap": True} | options))
    if config.pool == "unified":
        return config
    layout = arena_layout(model, torch.bfloat16, config.page_size, has_routes=config.keeps_routed_experts)
    if not 0.0 < slot_share < 1.0:
        raise ConfigError(f"the share of slots is {slot_share}: give one between 0 and 1")
    if not layout.slot_bytes or not layout.page_bytes:
        raise ConfigError("a model with one kind of state has no border to fix: use pool unified")
    num_slots = int(arena_bytes * slot_share) // layout.slot_bytes - 1
    num_pages = int(arena_bytes * (1 - slot_share)) // layout.page_bytes - 2  # the sink, and the one the border cuts
    if min(num_slots, num_pages) < 1:
        raise ConfigError(f"{arena_bytes} bytes hold no slot of {layout.slot_bytes} beside a page: give more memory")
    return replace(config, num_slots=num_slots, num_pages=num_pages)


def plan_replay(config: EngineConfig, model: K3Config, layout: ArenaLayout, dtype: torch.dtype) -> MemoryPlan:
    """The planner's, but for what a unified pool does not need: a border. All of the arena may be one request's pages,
    and requests run as long as there is room."""
    assert config.memory_bytes != "auto"
    plan = plan_memory(config, model, dtype, config.memory_bytes, chunk=CHUNK)
    if config.pool == "fixed":
        return plan
    plan = replace(plan, arena_bytes=config.memory_bytes, max_running=config.max_running)
    limits = (None if layout.slot_bytes else plan.num_slots, None if layout.page_bytes else plan.num_pages)
    shape = UnifiedShape(layout, plan.arena_bytes, *limits)
    most = model.max_position_embeddings if config.max_context == "auto" else config.max_context
    return replace(plan, max_context=min(most, shape.pages_beside(1) * config.page_size))
