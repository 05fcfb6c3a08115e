"""Runs a model over its cache without an engine: any mix of spans of any requests in one forward.

Slots and pages are dealt out in a scrambled order and poisoned with NaN, so that a read of anything that was not
written shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.spans import Spans
from baltoro.model.cache_map import CacheMap, Snapshot
from baltoro.model.context import ForwardContext, Media
from baltoro.model.decoder import K3Model
from baltoro.model.state import CacheViews


class Harness:
    """One cache with room for `num_requests` requests of up to `max_tokens` tokens.

    Requests own the slots 1 .. num_requests; `num_spare` slots more, the last ones, are for snapshots.
    """

    def __init__(
        self, model: K3Model, num_requests: int, *, page_size: int = 4, max_tokens: int = 256, num_spare: int = 0
    ) -> None:
        self.model, self.page_size = model, page_size
        config = model.config
        pages_each = -(-max_tokens // page_size)
        order = torch.randperm(num_requests * pages_each, generator=torch.Generator().manual_seed(7)) + 1
        self.tables = order.view(num_requests, pages_each)
        self.slots = torch.arange(num_requests, 0, -1)
        self.done = [0] * num_requests
        self.adapters: Sequence[int] | None = None  # adapter slot of each request
        width = 3 * config.kda_width
        num_slots = num_requests + num_spare + 1
        state = (num_slots, config.kda_num_heads, config.kda_head_dim, config.kda_head_dim)
        acc = acc_dtype(model.dtype)
        num_kda, num_mla = len(config.kda_layers), len(config.mla_layers)
        conv = (num_slots, config.conv_size - 1, width)
        kv = (num_requests * pages_each + 1, page_size, config.kv_row_width)
        self.views = CacheViews(
            recurrent=tuple(torch.full(state, torch.nan, dtype=acc) for _ in range(num_kda)),
            conv=tuple(torch.full(conv, torch.nan, dtype=model.dtype) for _ in range(num_kda)),
            kv=tuple(torch.full(kv, torch.nan, dtype=model.dtype) for _ in range(num_mla)),
        )

    def step(
        self,
        work: Sequence[tuple[int, Sequence[int]]],
        media: Media | None = None,
        snapshots: Sequence[tuple[int, int, int]] = (),
    ) -> list[Tensor]:
        """Advance requests by spans of tokens in one forward; logits [length, X] of each span, in `work`'s order.

        `snapshots`: (place in `work`, length, slot).
        `media` rows count in the order decodes first, as the forward sees them (pass spans in that order then).
        """
        rank = sorted(range(len(work)), key=lambda i: not self._is_decode(*work[i]))
        ordered = [work[i] for i in rank]
        starts = [self.done[request] for request, _ in ordered]
        spans = Spans.build([len(tokens) for _, tokens in ordered], starts)
        requests = torch.tensor([request for request, _ in ordered])
        tables = self.tables[requests]
        rows = []
        for n, (start, end) in enumerate(zip(spans.starts, spans.ends, strict=True)):
            places = torch.arange(start, end)
            rows.append(tables[n, places // self.page_size] * self.page_size + places % self.page_size)
        taken = tuple(Snapshot(rank.index(i), length, slot) for i, length, slot in snapshots)
        cache = CacheMap(self.slots[requests], torch.cat(rows), tables, self.page_size, self.views, taken)
        num_decodes = sum(self._is_decode(*item) for item in ordered)
        tokens = torch.tensor([token for _, span in ordered for token in span])
        with torch.no_grad():
            adapters = None if self.adapters is None else tuple(self.adapters[request] for request, _ in ordered)
            logits = self.model(ForwardContext(tokens, spans, cache, num_decodes, media=media, adapters=adapters))
        for request, span in ordered:
            self.done[request] += len(span)
        parts = dict(zip(rank, logits.split(spans.lengths), strict=True))
        return [parts[i] for i in range(len(work))]

    def run(self, request: int, tokens: Sequence[int], cuts: Sequence[int]) -> Tensor:
        """All logits of one request whose prompt is cut into spans of `cuts` tokens (the rest is the last span)."""
        edges = [0]
        for cut in cuts:
            edges.append(min(edges[-1] + cut, len(tokens)))
        edges.append(len(tokens))
        pieces = [tokens[a:b] for a, b in pairwise(edges) if b > a]
        return torch.cat([self.step([(request, piece)])[0] for piece in pieces])

    def state(self, slot: int) -> list[Tensor]:
        """Copies of all that a slot holds, recurrent then conv, layer by layer."""
        return [view[slot].clone() for view in (*self.views.recurrent, *self.views.conv)]

    def restore(self, request: int, slot: int, depth: int) -> None:
        """Let a request whose rows up to `depth` are in the cache continue from a kept state."""
        for view in (*self.views.recurrent, *self.views.conv):
            view[self.slots[request]] = view[slot]
        self.done[request] = depth

    def _is_decode(self, request: int, tokens: Sequence[int]) -> bool:
        return len(tokens) == 1 and self.done[request] > 0


def random_tokens(count: int, vocab_size: int, seed: int = 3) -> list[int]:
    """`count` ids."""
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
