"""How packed spans are laid out for the Triton chunk form: chunks, and segments where the spans do not fill the card.

The state pass is serial in a span, so few heads and a long span leave most of a card idle. Such a span is cut into
segments that run side by side: a pass makes each segment's fragment (M, S~), which says S_out = S_in M + S~; merging
them gives every segment the state that enters it, exactly. The extra passes cost about twice the work, so it is done
only where the estimate below says that it pays.
All of it pure functions of host integers; no torch. Source: spec/kernels.md A.7, A.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from baltoro.errors import ShapeError

# Of a segment's chunks: shorter ones cost more in merging than they save, whatever the card.
SHORTEST_SEGMENT = 4
# Cost of merging one fragment, in steps of the state pass: one small product instead of four, but nothing beside it.
MERGE_COST = 0.5


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Chunks of all spans in order, and the segments they are run in.

    chunks     (first token row, tokens, border or -1) each; a border's state is the one that leaves the chunk
    segments   (span, first chunk, number of chunks, 1 if it ends its span) each, span by span
    order      segments, longest first: the order of launch
    spans      (first segment, number of segments) each; an empty span has one segment without chunks
    fragments  segments whose fragment is needed: all but the last of a span that has several
    borders    for each border asked for, which of the distinct ones it is
    """

    chunks: tuple[tuple[int, int, int], ...]
    segments: tuple[tuple[int, int, int, int], ...]
    order: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    fragments: tuple[int, ...]
    borders: tuple[int, ...]

    @property
    def num_borders(self) -> int:
        """Distinct ones."""
        return len(set(self.borders))


def plan_chunks(
    lengths: Sequence[int],
    starts: Sequence[int],
    *,
    chunk: int,
    borders: Sequence[tuple[int, int]] = (),
    segment_chunks: int | None = None,
) -> ChunkPlan:
    """Lay out spans (lengths may be 0) whose first tokens have absolute positions `starts`; segments of at most
    `segment_chunks` chunks, None: one a span. Errors: ShapeError for a border where no chunks meet."""
    ends = _border_chunks(borders, lengths, starts, chunk)
    distinct = {place: i for i, place in enumerate(dict.fromkeys(ends))}
    chunks: list[tuple[int, int, int]] = []
    segments: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int]] = []
    row = 0
    for n, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        first_chunk, position, end = len(chunks), start, start + length
        while position < end:
            stop = min(end, (position // chunk + 1) * chunk)
            chunks.append((row, stop - position, distinct.get((n, len(chunks) - first_chunk), -1)))
            row, position = row + stop - position, stop
        count = len(chunks) - first_chunk
        pieces = _cut(count, segment_chunks)
        spans.append((len(segments), len(pieces)))
        for i, (first, size) in enumerate(pieces):
            segments.append((n, first_chunk + first, size, int(i + 1 == len(pieces))))
    order = sorted(range(len(segments)), key=lambda s: -segments[s][2])
    fragments = [s for s, segment in enumerate(segments) if not segment[3]]
    return ChunkPlan(
        tuple(chunks), tuple(segments), tuple(order), tuple(spans), tuple(fragments), tuple(distinct[e] for e in ends)
    )


def choose_segment_chunks(counts: Sequence[int], *, programs_per_segment: int, num_units: int) -> int | None:
    """Chunks a segment should have, None for uncut spans.

    counts: chunks of each span. programs_per_segment: heads times blocks of the state's rows. num_units: processors.
    """
    longest = max(counts, default=0)
    best, best_cost = None, estimate(counts, None, programs_per_segment, num_units)
    for pieces in range(2, num_units + 1):
        size = -(-longest // pieces)
        if size < SHORTEST_SEGMENT:
            break
        cost = estimate(counts, size, programs_per_segment, num_units)
        if cost < best_cost:
            best, best_cost = size, cost
    return best


def estimate(counts: Sequence[int], size: int | None, programs_per_segment: int, num_units: int) -> float:
    """Time of the state passes, in steps of one chunk: the longest chain, or the work over the processors."""
    pieces = [[n for _, n in _cut(count, size)] for count in counts]
    work = sum(counts) * programs_per_segment / num_units
    cost = max(max((n for of_span in pieces for n in of_span), default=0), work)
    cut = [of_span for of_span in pieces if len(of_span) > 1]
    if cut:
        # twice the rows: those of S~ and those of M
        chunks = sum(sum(of_span[:-1]) for of_span in cut)
        cost += max(max(n for of_span in cut for n in of_span), 2 * chunks * programs_per_segment / num_units)
        cost += MERGE_COST * max(len(of_span) for of_span in cut)
    return cost


def chunk_counts(lengths: Sequence[int], starts: Sequence[int], chunk: int) -> list[int]:
    """Chunks of each span; 0 for an empty one."""
    return [(s + n - 1) // chunk - s // chunk + 1 if n else 0 for n, s in zip(lengths, starts, strict=True)]


def _cut(count: int, size: int | None) -> list[tuple[int, int]]:
    """(first, number) of the segments of `count` chunks, of nearly one size."""
    num = 1 if not size else max(1, -(-count // size))
    edges = [count * i // num for i in range(num + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


def _border_chunks(
    borders: Sequence[tuple[int, int]], lengths: Sequence[int], starts: Sequence[int], chunk: int
) -> list[tuple[int, int]]:
    """(span, chunk within it that ends there) of every border."""
    found = []
    for n, length in borders:
        at = starts[n] + length
        if not 0 < length < lengths[n] or at % chunk:
            raise ShapeError(f"no state at position {at}: inside a span they exist at multiples of {chunk}")
        found.append((n, at // chunk - starts[n] // chunk - 1))
    return found
