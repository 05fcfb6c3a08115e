"""The grid of depths: common multiples of chunk and hash endpoint, counted from position 0."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baltoro.cache.grid import Grid
from baltoro.errors import ConfigError


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 100), st.integers(0, 100))
def test_every_answer_is_the_one_of_a_search(chunk: int, endpoint: int, start: int, end: int) -> None:
    grid = Grid(chunk, endpoint, 2 * math.lcm(chunk, endpoint))
    stands = [depth for depth in range(201) if depth % chunk == 0 and depth % endpoint == 0]
    assert grid.floor(end) == max(depth for depth in stands if depth <= end)
    assert grid.floor_endpoint(end) == max(depth for depth in range(end + 1) if depth % endpoint == 0)
    assert grid.deepest_in(start, end) == max((depth for depth in stands if start < depth <= end), default=0)


def test_a_span_that_starts_behind_the_last_grid_point_has_none() -> None:
    """vllm#53212: a hit at 70 and a span to 100; the boundary 64 is not written by that span."""
    grid = Grid(chunk=64, endpoint=64, interval=256)
    assert grid.deepest_in(70, 100) == 0
    assert grid.deepest_in(64, 127) == 0
    assert grid.deepest_in(70, 128) == 128
    assert grid.deepest_in(0, 300) == 256


def test_step_is_common_to_chunk_and_endpoint_whatever_the_page() -> None:
    """sgl#34808: a state floored to a chunk of 64 on a node floored to 512."""
    grid = Grid(chunk=64, endpoint=512, interval=512)
    assert grid.step == 512 and grid.floor(20416) == grid.floor_endpoint(20416) == 19968
    assert Grid(chunk=64, endpoint=48, interval=192).step == 192


def test_an_interval_off_the_grid_is_refused_with_one_that_works() -> None:
    with pytest.raises(ConfigError, match=r"300 is no multiple of 192.*use 384"):
        Grid(chunk=64, endpoint=48, interval=300)
    with pytest.raises(ConfigError, match="endpoint is 0"):
        Grid(chunk=64, endpoint=0, interval=64)
