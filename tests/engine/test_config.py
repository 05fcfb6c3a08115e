"""EngineConfig refuses what cannot be; MemoryPlan resolves every auto and adds up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baltoro.cache.books import Books, FixedBooks
from baltoro.cache.pages import pages_for
from baltoro.cache.shape import ArenaShape
from baltoro.cache.unified import UnifiedBooks
from baltoro.config import build
from baltoro.engine.config import EngineConfig
from baltoro.engine.planner import MemoryPlan, arena_layout, free_bytes, plan_memory, resolve_dtype, unified_shape
from baltoro.errors import ConfigError
from baltoro.model.sizes import measure
from tests.engine.stub import stub_config
from tests.tiny import tiny_k3, tiny_kimi_linear


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 48},
        {"page_size": 0},
        {"max_batch_tokens": 0},
        {"max_running": 0},
        {"num_pages": 0},
        {"memory_bytes": -5},
        {"dtype": "float16"},
        {"retract_every": -1},
        {"seed": -1},
    ],
)
def test_an_impossible_option_is_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**options)


def test_config_reads_from_plain_values() -> None:
    assert build(EngineConfig, {"num_pages": "auto", "memory_bytes": 1000, "page_size": 16}).memory_bytes == 1000
    with pytest.raises(ConfigError, match="num_pages"):
        build(EngineConfig, {"num_pages": "many"})


def test_bytes_of_one_slot_and_one_page_follow_from_the_shape() -> None:
    config = tiny_k3()  # 4 KDA layers of 3 heads of 8, 3 MLA layers with rows of 20
    layout = arena_layout(config, torch.bfloat16, 16)
    recurrent, conv = layout.slot_parts
    assert recurrent.shape == (4, 3, 8, 8) and recurrent.dtype == torch.float32
    assert conv.shape == (4, 3, 72) and conv.dtype == torch.bfloat16
    assert layout.slot_bytes == 3072 + 1728
    assert layout.page_bytes == 16 * 3 * 20 * 2
    assert arena_layout(config, torch.float64, 16).slot_parts[0].dtype == torch.float64


def test_the_arena_holds_what_sizes_says() -> None:
    """One arithmetic: both families."""
    for config in (tiny_k3(dtype="bfloat16"), tiny_kimi_linear(dtype="bfloat16")):
        wanted, layout = measure(config), arena_layout(config, torch.bfloat16, 16)
        assert layout.page_bytes == 16 * wanted.kv_bytes_per_token
        assert sum(part.num_bytes for part in layout.slot_parts) == wanted.state_bytes_per_request


@settings(max_examples=60, deadline=None)
@given(
    memory=st.integers(40_000, 3_000_000),
    page_size=st.sampled_from([1, 16, 64]),
    max_running=st.integers(1, 50),
    context=st.one_of(st.just("auto"), st.integers(2, 3000)),
    pool=st.sampled_from(["unified", "fixed"]),
)
def test_the_plan_keeps_to_the_memory_and_one_request_always_fits(
    memory: int, page_size: int, max_running: int, context: Any, pool: Any
) -> None:
    config = EngineConfig(
        memory_bytes=memory, page_size=page_size, max_running=max_running, max_context=context, pool=pool
    )
    try:
        plan = plan_memory(config, tiny_k3(), torch.float32, 0)
    except ConfigError as error:
        assert "memory_bytes" in str(error)
        return
    assert plan.arena_bytes <= memory
    assert 1 <= plan.max_running <= max_running and plan.max_context >= 2
    books = books_of(config, plan)
    assert books.has_room(pages_for(plan.max_context, page_size), 1)
    assert books.has_room(0, plan.max_running)
    assert pool == "fixed" or books.has_room(plan.max_running, plan.max_running), "each at least a slot and a page"
    if context != "auto":
        assert plan.max_context == context


def test_memory_is_not_taken_for_what_can_never_be_used() -> None:
    plan = plan_memory(EngineConfig(max_running=2, max_context=100), tiny_k3(), torch.float32, 10**12)
    assert plan.max_running == 2 and plan.num_slots == 2 * 4 and plan.num_pages == 2 * 2


def books_of(config: EngineConfig, plan: MemoryPlan) -> Books:
    layout = arena_layout(tiny_k3(), torch.float32, config.page_size)
    if config.pool == "fixed":
        shape = ArenaShape(layout, plan.num_slots, plan.num_pages)
        return FixedBooks(shape.first_page, plan.num_pages, plan.num_slots)
    return UnifiedBooks(unified_shape(layout, plan.arena_bytes, plan.num_slots, plan.num_pages))


def test_memory_is_split_between_states_and_pages() -> None:
    """With room for few, both kinds get their part: neither slots without pages nor pages without slots."""
    config, free = EngineConfig(max_running=1000, device="cuda", pool="fixed"), 4_000_000
    plan = plan_memory(config, tiny_k3(max_position_embeddings=100_000), torch.float32, free)
    assert 2 <= plan.num_slots < 1000
    assert plan.num_pages * 64 >= plan.max_running * 4096 * 0.9
    assert 0.8 * free < plan.arena_bytes < 0.86 * free


def test_a_context_that_the_pool_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_context 500"):
        plan_memory(EngineConfig(num_pages=3, max_context=500), stub_config(), torch.float32, 10**9)
    with pytest.raises(ConfigError, match="raise memory_bytes"):
        plan_memory(EngineConfig(num_pages=1, page_size=1), stub_config(), torch.float32, 10**9)


def test_auto_dtype_and_free_bytes() -> None:
    assert resolve_dtype(EngineConfig()) == torch.float32
    assert resolve_dtype(EngineConfig(device="cuda")) == torch.bfloat16
    assert resolve_dtype(EngineConfig(dtype="float64")) == torch.float64
    assert free_bytes("cpu") > 2**28
