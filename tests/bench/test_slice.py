"""The rank slice at tiny sizes on the CPU: every rung gives one result, bytes are counted, the timeline adds up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baltoro.bench.kernels.timeline import describe, heaviest, slots
from baltoro.bench.slice import LADDER, Seen, Slice, climb, published_shape
from scripts.gpu.lab_slice import tiny_shape


@pytest.mark.parametrize("batch", [1, 5])
def test_every_rung_gives_the_same_step(batch: int) -> None:
    one, first = Slice(tiny_shape(), batch, dtype=torch.float64, device="cpu"), None
    seen: list[tuple[bool, bool]] = []

    def measure(work: Callable[[], object], is_captured: bool) -> float:
        work()
        seen.append((is_captured, one.moe.is_forked))
        return 5.0

    for rung in LADDER:
        step, out = climb(one, rung, 1e9, measure, first)
        first = out if first is None else first
        assert step.error < 1e-9 and step.flipped == 0 and step.time_us == 5.0 and step.share > 0
    assert seen[0] == (False, False) and seen[-1] == (True, True)


def test_tokens_that_pick_other_experts_are_counted_apart() -> None:
    one = Slice(tiny_shape(), 5, dtype=torch.float64, device="cpu")
    _, seen = climb(one, LADDER[-1], 1e9, lambda work, is_captured: 1.0)
    other = Seen(seen.out.clone(), seen.picks.clone())
    other.out[2] += 1.0
    other.picks[2, 0] += 1
    step, _ = climb(one, LADDER[-1], 1e9, lambda work, is_captured: 1.0, other)
    assert step.flipped == 1 and step.error < 1e-12
    other.out[3] += 1.0
    assert climb(one, LADDER[-1], 1e9, lambda work, is_captured: 1.0, other)[0].error > 0.01


def test_bytes_are_those_of_what_a_step_touches() -> None:
    one = Slice(tiny_shape(), 1, dtype=torch.float32, device="cpu")
    config, parts = one.shape.config, one.bytes_by_part()
    assert one.num_hit() == config.num_active_experts
    size = 3 * config.expert_width * config.expert_intermediate_size
    assert parts["experts hit"] == config.num_active_experts * size * 17 // 32
    assert parts["KDA states"] == 2 * config.kda_num_heads * config.kda_head_dim**2 * 4
    assert parts["keys"] == one.shape.keys * config.kv_row_width * 4


def test_published_widths_are_a_rank_of_eight() -> None:
    shape = published_shape()
    assert (shape.config.kda_num_heads, shape.config.num_heads, shape.config.num_experts) == (12, 12, 112)
    assert (shape.experts, shape.shared, shape.bank) == (896, 768, 8)


def test_a_timeline_knows_its_gaps() -> None:
    one = [(0.0, 2.0, "a"), (3.0, 5.0, "b"), (4.0, 4.5, "c")]
    found = slots(sorted([*((s - 10, e - 10, n) for s, e, n in one), *one]), 2)
    assert [(slot.name, slot.gap_us) for slot in found] == [("a", 0.0), ("b", 1.0), ("c", -1.0)]
    assert describe(found).endswith("3 kernels in 5.0 us, of which 1.0 us nothing ran")


def test_the_heaviest_kernels_come_after_what_nothing_ran_for() -> None:
    found = slots([(0.0, 4.0, "a"), (6.0, 7.0, "b"), (7.0, 9.0, "a"), (9.5, 12.0, "c")], 1)
    assert heaviest(found, 2) == [("nothing ran", 2, 2.5), ("a", 2, 6.0), ("c", 1, 2.5)]
