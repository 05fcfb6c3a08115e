"""The planner of the KDA chunk form: chunks and segments cover every token once; spans are cut only where it pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baltoro.errors import ShapeError
from baltoro.kernels.kda.plan import choose_segment_chunks, chunk_counts, estimate, plan_chunks

spans = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), max_size=5)


@given(spans, st.sampled_from([16, 64]), st.one_of(st.none(), st.integers(1, 6)))
def test_chunks_and_segments_cover_every_token_once(
    layout: list[tuple[int, int]], chunk: int, segment_chunks: int | None
) -> None:
    lengths, starts = [n for n, _ in layout], [s for _, s in layout]
    plan = plan_chunks(lengths, starts, chunk=chunk, segment_chunks=segment_chunks)
    rows = [row for first, length, _ in plan.chunks for row in range(first, first + length)]
    assert rows == list(range(sum(lengths)))
    assert sorted(plan.order) == list(range(len(plan.segments))) and len(plan.spans) == len(layout)
    sizes = [plan.segments[s][2] for s in plan.order]
    assert sizes == sorted(sizes, reverse=True)
    assert segment_chunks is None or all(size <= segment_chunks for size in sizes)
    taken = []
    for n, (first, count) in enumerate(plan.spans):
        position = starts[n]
        for s in range(first, first + count):
            span, first_chunk, size, is_last = plan.segments[s]
            assert span == n and is_last == (s + 1 == first + count) and (s in plan.fragments) == (not is_last)
            for row, length, _ in plan.chunks[first_chunk : first_chunk + size]:
                assert position // chunk == (position + length - 1) // chunk, "a chunk crosses a multiple"
                position += length
                taken.append(row)
        assert position == starts[n] + lengths[n]
    assert taken == [row for row, _, _ in plan.chunks]
    assert chunk_counts(lengths, starts, chunk) == [
        sum(plan.segments[s][2] for s in range(first, first + count)) for first, count in plan.spans
    ]


def test_a_border_is_the_chunk_that_ends_there_and_may_be_asked_for_twice() -> None:
    plan = plan_chunks([70, 40], [5, 0], chunk=16, borders=[(0, 11), (1, 32), (0, 11), (0, 59)])
    assert plan.borders == (0, 1, 0, 2) and plan.num_borders == 3
    ends = {border: first + length for first, length, border in plan.chunks if border >= 0}
    assert ends == {0: 11, 1: 70 + 32, 2: 59}


@pytest.mark.parametrize("border", [(0, 10), (0, 0), (0, 75), (0, 70)])
def test_a_border_off_the_grid_or_outside_is_an_error(border: tuple[int, int]) -> None:
    with pytest.raises(ShapeError, match="multiples of 16"):
        plan_chunks([70], [5], chunk=16, borders=[border])


def test_a_full_card_is_not_cut_and_an_idle_one_is() -> None:
    assert choose_segment_chunks([128], programs_per_segment=192, num_units=132) is None
    assert choose_segment_chunks([16] * 8, programs_per_segment=192, num_units=132) is None
    few = choose_segment_chunks([1024], programs_per_segment=24, num_units=132)
    assert few is not None and estimate([1024], few, 24, 132) < 0.6 * estimate([1024], None, 24, 132)
    assert choose_segment_chunks([3], programs_per_segment=1, num_units=132) is None
    assert choose_segment_chunks([], programs_per_segment=1, num_units=132) is None


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=5), st.integers(1, 400), st.integers(1, 132))
def test_what_is_chosen_is_never_estimated_slower_than_uncut(counts: list[int], programs: int, units: int) -> None:
    size = choose_segment_chunks(counts, programs_per_segment=programs, num_units=units)
    assert estimate(counts, size, programs, units) <= estimate(counts, None, programs, units)
