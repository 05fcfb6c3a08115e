"""Where packed tokens lie among chunks: the layout in which the chunk form works.

Chunk borders are absolute multiples of the chunk, so a span that starts off the grid has a short first chunk. Chunks
are ordered step by step: the first chunk of every span, then the second of every span that has one, and so on, spans
with more chunks first. The serial pass then advances all spans at once: at each step those still running are a prefix.
Short chunks are padded with zeros at their end: k = 0, beta = 0 and g = 0 leave a state as it is.
A state inside a span is at hand only where two chunks meet: it is what enters the later one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.copies import to_device
from baltoro.kernels.spans import Borders, Spans

# tokens of a chunk, unless a test says otherwise
CHUNK = 64


class Grid(NamedTuple):
    """NC chunks of `chunk` rows for T tokens of N spans. A tuple, so that spans can take it to another device.

    order  int64 [N], spans by falling number of chunks; None if that is their own order
    steps  how many spans run at each step; their chunks follow one another
    rows   int64 [T], row of each token among the NC * chunk; None if it is the token's own number and none is padding
    later  int64 [B], the chunk that begins at each border whose state is wanted; None if there are none
    """

    chunk: int
    num_chunks: int
    order: Tensor | None
    steps: tuple[int, ...]
    rows: Tensor | None
    later: Tensor | None = None

    @staticmethod
    def build(spans: Spans, chunk: int, device: torch.device, borders: Borders = ()) -> Grid:
        """Lay out `spans`; index tensors on `device`. Errors: ShapeError for a border where no chunks meet."""
        counts = [(e - 1) // chunk - s // chunk + 1 for s, e in zip(spans.starts, spans.ends, strict=True)]
        order = sorted(range(len(spans)), key=lambda n: -counts[n])
        steps = tuple(sum(c > step for c in counts) for step in range(max(counts, default=0)))
        firsts = [sum(steps[:step]) for step in range(len(steps))]
        rank = {n: r for r, n in enumerate(order)}
        places, lengths = [], []  # of every chunk, in the order of the tokens
        for n, (start, end) in enumerate(zip(spans.starts, spans.ends, strict=True)):
            for step in range(counts[n]):
                border = (start // chunk + step) * chunk
                places.append(firsts[step] + rank[n])
                lengths.append(min(end, border + chunk) - max(start, border))
        is_plain = all(n == chunk for n in lengths) and places == list(range(len(places)))
        rows = None
        if not is_plain:
            sizes, tokens = torch.tensor(lengths), torch.arange(spans.num_tokens)
            shift = torch.tensor(places) * chunk - (sizes.cumsum(0) - sizes)
            rows = to_device(tokens + shift.repeat_interleave(sizes), device)
        later = [firsts[step] + rank[n] for n, step in _steps_at(borders, spans, chunk)]
        is_ordered = order == list(range(len(order)))
        return Grid(
            chunk,
            len(places),
            None if is_ordered else to_device(torch.tensor(order), device),
            steps,
            rows,
            to_device(torch.tensor(later), device) if later else None,
        )

    @staticmethod
    def of(spans: Spans, chunk: int, borders: Borders = ()) -> Grid:
        """`build` on the spans' own device, once for all layers."""
        return spans.once(("grid", chunk, borders), lambda found: Grid.build(found, chunk, found.device, borders))

    @property
    def num_spans(self) -> int:
        """N: all run at the first step."""
        return self.steps[0] if self.steps else 0

    def spread(self, x: Tensor) -> Tensor:
        """[T, H, *] -> [NC * H, chunk, *] contiguous, zeros in the padding."""
        if self.rows is not None:
            x = x.new_zeros(self.num_chunks * self.chunk, *x.shape[1:]).index_copy_(0, self.rows, x)
        return torch.unflatten(x, 0, (-1, self.chunk)).transpose(1, 2).flatten(0, 1).contiguous()

    def gather(self, x: Tensor, heads: int) -> Tensor:
        """[NC * H, chunk, *] -> [T, H, *], dropping the padding."""
        x = torch.unflatten(x, 0, (-1, heads)).transpose(1, 2).flatten(0, 1)
        return x if self.rows is None else x.index_select(0, self.rows)

    def sort(self, state: Tensor) -> Tensor:
        """[N, H, V, K] by span -> a new [N * H, V, K] in the order of the steps."""
        return (state.clone() if self.order is None else state.index_select(0, self.order)).flatten(0, 1)

    def unsort(self, state: Tensor, heads: int) -> Tensor:
        """[N * H, V, K] in the order of the steps -> [N, H, V, K] by span."""
        state = torch.unflatten(state, 0, (-1, heads))
        return state if self.order is None else torch.empty_like(state).index_copy_(0, self.order, state)

    def add_borders(self, after: Tensor, entering: Tensor) -> Tensor:
        """States by span [N, H, V, K], then those at the borders, of `entering` [NC * H, V, K]: [N + B, H, V, K]."""
        if self.later is None:
            return after
        return torch.cat([after, torch.unflatten(entering, 0, (-1, after.shape[1])).index_select(0, self.later)])

    def take_borders(self, d_after: Tensor, d_entering: Tensor) -> Tensor:
        """Backward of `add_borders`: adds to `d_entering` in place; returns the gradients by span [N, H, V, K]."""
        if self.later is None:
            return d_after
        by_chunk = torch.unflatten(d_entering, 0, (-1, d_after.shape[1]))
        by_chunk.index_add_(0, self.later, d_after[self.num_spans :])
        return d_after[: self.num_spans]

    def slices(self, heads: int) -> list[tuple[int, slice]]:
        """(running states, their chunks) of each step, both counted in heads."""
        found, first = [], 0
        for running in self.steps:
            found.append((running * heads, slice(first * heads, (first + running) * heads)))
            first += running
        return found


def _steps_at(borders: Borders, spans: Spans, chunk: int) -> list[tuple[int, int]]:
    """(span, step) of the chunk that begins at each border."""
    spans.check_borders(borders)
    found = []
    for n, length in borders:
        start = spans.starts[n]
        if (start + length) % chunk:
            raise ShapeError(f"no state at position {start + length}: inside a span they exist at multiples of {chunk}")
        found.append((n, (start + length) // chunk - start // chunk))
    return found
