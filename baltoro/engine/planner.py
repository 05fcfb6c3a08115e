"""MemoryPlan: every "auto" of the engine resolved once, from the model's shape and the machine's memory.

In: EngineConfig, K3Config, the dtype of the weights, bytes that are free. Out: a frozen MemoryPlan, shown at start.
Invariant: one request of max_context tokens always fits alone, so a request that was admitted can always finish.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from baltoro.cache.grid import Grid
from baltoro.cache.pages import pages_for
from baltoro.cache.shape import ALIGNMENT, ArenaLayout, ArenaShape, Part, UnifiedShape
from baltoro.engine.config import EngineConfig
from baltoro.engine.routes import row_with_routes
from baltoro.errors import ConfigError
from baltoro.kernels.precision import acc_dtype
from baltoro.model.config import K3Config

# Share of the machine that the arena may take when nothing is said: a CPU is shared with everything else there, a GPU
# was given to us (what is free there already excludes the weights).
CPU_SHARE, GPU_SHARE = 0.25, 0.85
# Tokens that a typical request holds: splits memory between slots and pages when both are "auto".
TYPICAL_TOKENS = 4096
# Slots planned for each running request when prefixes are kept: the working one, one on its way, two in the tree (the
# prompt it came from and the branch it is on; spec/serving.md A.2).
SLOTS_PER_REQUEST = 4
# Endpoint of models whose state is larger than this: a finer grid would hold more states than anybody can afford.
BIG_STATE_BYTES, BIG_ENDPOINT = 2**20, 512
TRACK_TOKENS = 256
# A CPU spends much of a step of a small model on dequantising packed experts (tiny model, one stream, one thread,
# 2026-11-30, three pairs: 19 to 24 ms a token packed, 13 to 18 dense); beyond this size memory counts for more.
DENSE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What was decided. `num_pages` and `num_slots` are those that can be handed out; the sinks come on top."""

    page_size: int
    num_pages: int
    num_slots: int
    max_running: int
    max_context: int
    slot_bytes: int
    page_bytes: int
    arena_bytes: int
    hash_endpoint: int
    state_grid: int
    track_interval: int
    is_overlapped: bool

    def describe(self) -> dict[str, int]:
        """For logs, `/server_info` and `baltoro explain`."""
        return asdict(self) | {"kv_tokens": self.num_pages * self.page_size}


def arena_layout(model: K3Config, dtype: torch.dtype, page_size: int, *, has_routes: bool = False) -> ArenaLayout:
    """Slot: recurrent states [L, H, V, K] and conv history [L, W-1, 3HK] of all KDA layers. Row: [L, R+Dr] of all MLA
    layers, or flat with routes behind it (`engine/routes.py`)."""
    num_kda, num_mla = len(model.kda_layers), len(model.mla_layers)
    heads, dim = model.kda_num_heads, model.kda_head_dim
    recurrent = Part((num_kda, heads, dim, dim), acc_dtype(dtype))
    conv = Part((num_kda, model.conv_size - 1, 3 * model.kda_width), dtype)
    row = Part((num_mla, model.kv_row_width), dtype)
    kept = row if num_mla else None
    return ArenaLayout(
        (recurrent, conv) if num_kda else (), row_with_routes(kept, model) if has_routes else kept, page_size
    )


def plan_grid(config: EngineConfig, layout: ArenaLayout, chunk: int) -> Grid:
    """Where prefixes can be found and states kept; `chunk`: where the model has states. Errors: ConfigError."""
    endpoint = config.hash_endpoint
    if endpoint == "auto":
        endpoint = BIG_ENDPOINT if layout.slot_bytes > BIG_STATE_BYTES else chunk
    if endpoint % config.page_size and config.page_size % endpoint:
        raise ConfigError(
            f"page_size {config.page_size} and hash_endpoint {endpoint} do not fit: one must be a multiple of the other"
        )
    step = math.lcm(chunk, endpoint)
    interval = config.track_interval
    return Grid(chunk, endpoint, -(-TRACK_TOKENS // step) * step if interval == "auto" else interval)


def plan_memory(
    config: EngineConfig, model: K3Config, dtype: torch.dtype, free_bytes: int, *, chunk: int = 64
) -> MemoryPlan:
    """Resolve pages, slots, running requests, context and grid. Errors: ConfigError when one request cannot fit."""
    layout = arena_layout(model, dtype, config.page_size, has_routes=config.keeps_routed_experts)
    wanted_context = model.max_position_embeddings
    if config.max_context != "auto":
        wanted_context = config.max_context
    share = CPU_SHARE if config.device == "cpu" else GPU_SHARE
    memory = int(free_bytes * share) if config.memory_bytes == "auto" else config.memory_bytes
    grid = plan_grid(config, layout, chunk)
    num_running, num_slots = _slots(config, layout, memory, wanted_context)
    num_pages = _pages(config, layout, memory - (num_slots + 1) * layout.slot_bytes, num_slots, wanted_context)
    room = num_pages * config.page_size
    arena_bytes = ArenaShape(layout, num_slots, num_pages).total_bytes
    if config.pool == "unified" and config.num_pages == config.num_slots == "auto":
        shape = unified_shape(layout, arena_bytes, num_slots, num_pages)  # no border: what slots leave, pages may take
        least = layout.slot_bytes + layout.page_bytes  # of a request; admission sees to the rest
        num_running = max(num_running, min(config.max_running, arena_bytes // least - 1) if least else 0)
        room = shape.pages_beside(1) * config.page_size
    if config.max_context != "auto" and room < config.max_context:
        raise ConfigError(
            f"max_context {config.max_context} does not fit into {num_pages} pages of {config.page_size} tokens: "
            "raise memory_bytes or num_pages, or lower max_context"
        )
    if min(wanted_context, room) < 2:
        raise ConfigError(f"{memory} bytes hold no request of two tokens: raise memory_bytes")
    return MemoryPlan(
        page_size=config.page_size,
        num_pages=num_pages,
        num_slots=num_slots,
        max_running=num_running,
        max_context=min(wanted_context, room),
        slot_bytes=layout.slot_bytes,
        page_bytes=layout.page_bytes,
        arena_bytes=arena_bytes,
        hash_endpoint=grid.endpoint,
        state_grid=grid.step,
        track_interval=grid.interval,
        is_overlapped=config.device != "cpu" if config.overlap == "auto" else config.overlap,
    )


def unified_shape(layout: ArenaLayout, arena_bytes: int, num_slots: int, num_pages: int) -> UnifiedShape:
    """An arena without a border; a kind without bytes is bounded by its planned number."""
    return UnifiedShape(
        layout,
        arena_bytes,
        slot_limit=None if layout.slot_bytes else num_slots,
        page_limit=None if layout.page_bytes else num_pages,
    )


def _slots(config: EngineConfig, layout: ArenaLayout, memory: int, context: int) -> tuple[int, int]:
    """(requests that run at once, slots)."""
    if config.num_slots != "auto":
        return min(config.max_running, config.num_slots), config.num_slots
    each = SLOTS_PER_REQUEST if config.prefix_cache else 1
    typical = pages_for(min(context, TYPICAL_TOKENS), config.page_size) * layout.page_bytes
    per_request = each * layout.slot_bytes + typical
    if not per_request:
        return config.max_running, config.max_running
    fits = (memory - layout.slot_bytes - layout.page_bytes) // per_request  # the sinks first
    running = max(1, min(config.max_running, fits))
    return running, running * each if fits else 1


def _pages(config: EngineConfig, layout: ArenaLayout, memory: int, num_slots: int, context: int) -> int:
    """Pages that `memory` holds beside the slots; not more than the running requests can fill."""
    if config.num_pages != "auto":
        return config.num_pages
    useful = min(num_slots, config.max_running) * pages_for(context, config.page_size)
    if not layout.page_bytes:
        return useful
    # the last bytes may go to alignment; two pages to the sink and to what the border cuts
    fits = (memory - ALIGNMENT) // layout.page_bytes - 2
    if fits < 1:
        raise ConfigError(
            f"no KV page of {layout.page_bytes} bytes fits beside {num_slots} state slots of {layout.slot_bytes}: "
            "raise memory_bytes, or lower num_slots or page_size"
        )
    return min(useful, fits)


def check_device(device: str) -> None:
    """Errors: ConfigError for a device that this machine, or this build of torch, does not have."""
    if not device.startswith("cuda"):
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device}: torch {torch.__version__} sees no GPU here; set device to cpu")
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device {device}: there are {torch.cuda.device_count()} GPUs, counted from 0")


def resolve_dtype(config: EngineConfig) -> torch.dtype:
    """The activation dtype; auto is FP32 on a CPU (BF16 products are slow or emulated there), BF16 elsewhere."""
    if config.dtype == "auto":
        return torch.float32 if config.device == "cpu" else torch.bfloat16
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[config.dtype]


def are_experts_dense(config: EngineConfig, model: K3Config, dtype: torch.dtype) -> bool:
    """Whether the engine keeps the values of packed experts instead of the packed ones."""
    if config.expert_weights != "auto":
        return config.expert_weights == "dense"
    matrix = model.expert_width * model.expert_intermediate_size
    size = (model.num_layers - model.first_dense_layers) * model.num_experts * 3 * matrix * dtype.itemsize
    return config.device == "cpu" and not config.base_path and size <= DENSE_BYTES


def free_bytes(device: str) -> int:
    """Memory an engine may think of: of a GPU what is free now, of a CPU what the machine (or its cgroup) has."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total
