"""Ownership: the parts of all ranks cover everything once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baltoro.errors import ConfigError
from baltoro.parallel.shard import (
    Rule,
    expert_owner,
    num_owned_positions,
    owned_layers,
    owned_range,
    owned_shape,
    owned_slices,
    position_owner,
)


@given(count=st.integers(0, 50), size=st.integers(1, 12))
def test_ranges_cover_everything_once_and_evenly(count: int, size: int) -> None:
    parts = [owned_range(count, size=size, rank=rank) for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(count))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1 and lengths[0] == max(lengths)


@given(num_experts=st.integers(1, 50), size=st.integers(1, 12))
def test_an_expert_is_owned_by_the_rank_whose_range_holds_it(num_experts: int, size: int) -> None:
    for rank in range(size):
        for expert in owned_range(num_experts, size=size, rank=rank):
            assert expert_owner(expert, num_experts, size=size) == rank


@pytest.mark.parametrize("rule", ["rows", "cols", "heads", "head_cols", "expert"])
def test_parts_of_a_tensor_cover_it_once(rule: Rule) -> None:
    count = np.zeros((12, 18), dtype=int)
    for rank in range(3):
        count[owned_slices(count.shape, rule, num_heads=6, size=3, rank=rank)] += 1
    assert (count == 1).all()


def test_a_replicated_tensor_is_whole_everywhere() -> None:
    assert owned_slices((5, 7), "replicated", size=4, rank=3) == (slice(0, 5), slice(0, 7))


def test_heads_are_never_cut() -> None:
    assert owned_slices((24,), "heads", num_heads=6, size=3, rank=1) == (slice(8, 16),)
    assert owned_slices((5, 24), "head_cols", num_heads=6, size=3, rank=2) == (slice(0, 5), slice(16, 24))
    with pytest.raises(ConfigError, match="6 heads do not divide over 4 ranks; possible sizes: 1, 2, 3, 6"):
        owned_slices((24,), "heads", num_heads=6, size=4, rank=0)
    with pytest.raises(ConfigError, match="not made of 6 equal heads"):
        owned_slices((25,), "heads", num_heads=6, size=3, rank=0)


def test_rank_0_holds_the_most() -> None:
    assert owned_shape((10, 3), "rows", size=4) == (3, 3)
    assert owned_shape((10, 3), "rows", size=4, rank=3) == (2, 3)


@given(length=st.integers(0, 60), size=st.integers(1, 9))
def test_positions_are_dealt_round(length: int, size: int) -> None:
    owners = [position_owner(position, size=size) for position in range(length)]
    for rank in range(size):
        assert owners.count(rank) == num_owned_positions(length, size=size, rank=rank)


def test_stages_hold_consecutive_layers() -> None:
    assert [list(owned_layers(5, size=2, rank=rank)) for rank in (0, 1)] == [[0, 1, 2], [3, 4]]
    with pytest.raises(ConfigError, match="5 layers cannot fill 6"):
        owned_layers(5, size=6, rank=0)
