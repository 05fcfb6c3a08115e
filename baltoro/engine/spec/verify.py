"""Verify: draft windows through the model in one step, and the fold that then moves the states.

    run    each request's last token with the drafts behind it: logits of every one. KV rows are written, those of
           refused drafts will be written again; KDA states and conv histories are read, inputs recorded
    fold   moves states and histories behind the first so many tokens of each window: one launch over all layers

Windows may be ragged; all are filled up to one width. What fills up (tokens of a window, requests of a captured size)
is token 0, written to the sink page, place by place, so that nothing it sees was never written: kernels multiply
whole windows, and 0 times NaN would reach the tokens that count. Requests that fill up have the sink slot.
Captured by padded batch size beside the decodes (`graphs.py`), same memory pool; the fold is one launch as it is.
Invariants: a captured step reads nothing of the host. Each run is folded at most once, before the next.
Not here: drafts, acceptance, pages and what clients see of it (the scheduler plans no windows yet).
Source: spec/serving.md C.3, spec/kernels.md B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from baltoro.cache.windows import WindowRecords
from baltoro.engine.batch import Span
from baltoro.engine.graphs import Key, PageTable, Step, keys_of, padded_sizes
from baltoro.errors import InvariantError, ShapeError
from baltoro.kernels.copies import pinned
from baltoro.kernels.dispatch import kernels_for
from baltoro.kernels.lora.rows import AdapterRows
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.spans import Spans
from baltoro.model.cache_map import CacheMap
from baltoro.model.context import DraftWindows, FakeQuant, ForwardContext
from baltoro.model.state import CacheViews

NUM_FACTS = 4
"""Rows of a batch's numbers before the tokens: slot, keys in view of the last token, tokens, adapter slot."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step says of N windows, in memory that the next one overwrites. Behind a window's tokens: nothing.

    logits    [N, W, X], accumulate dtype: at t of the token behind the window's t-th
    ids       int64 [N, W], the likeliest of each
    is_valid  int64 [N, W], whether that has a finite logit
    """

    logits: Tensor
    ids: Tensor
    is_valid: Tensor


class Verifier:
    """Verify steps, captured and eager, and their input buffers. Used by one runner, on one stream."""

    def __init__(
        self,
        model: Callable[[ForwardContext], Tensor],
        views: CacheViews,
        records: WindowRecords,
        *,
        page_size: int,
        max_pages: int,
        device: torch.device,
        adapter_slots: int = 0,
        quant: FakeQuant | None = None,
    ) -> None:
        """`max_pages`: of one request, its window included. `adapter_slots`: in fixed form; 0: row by row, eagerly."""
        self._model, self._views, self._records, self._page_size = model, views, records, page_size
        self._device, self._adapter_slots, self._quant = device, adapter_slots, quant or FakeQuant()
        most, self.width = records.max_requests, records.width
        self._rows = torch.from_numpy(_padding(most, self.width, page_size)).to(device)
        self._table = PageTable(most, max(max_pages, -(-self.width // page_size)), device)
        self._drawn = torch.zeros(2, most, self.width, dtype=torch.int64, device=device)
        self._unfolded: tuple[int, int] | None = None  # requests of the last run, and how many it was filled up to
        self.sizes: tuple[int, ...] = ()
        self.steps: dict[Key, Step] = {}

    def plan_captures(self, max_batch: int) -> None:
        """Want a graph for every padded size up to `max_batch` windows."""
        self.sizes = padded_sizes(min(max_batch, self._records.max_requests))

    def wanted(self) -> list[Key]:
        """As `DecodeGraphs.wanted`."""
        return keys_of(self.sizes, has_adapters=self._adapter_slots > 0)

    def step(self, key: Key) -> Step:
        """The forward of so many windows of the buffers, asking the host for nothing."""
        size, has_adapters = key

        def step() -> Tensor:
            captured = None
            if has_adapters:
                each = self._rows[3, :size].unsqueeze(1).expand(-1, self.width).flatten()
                captured = AdapterRows.fixed(each, self._adapter_slots)
            return self._forward(size, captured, None)

        return step

    @torch.inference_mode()
    def run(self, spans: Sequence[Span]) -> Verified:
        """Spans of 1 .. W tokens each, behind at least one token. Writes KV rows, records and nothing else.

        Errors: ShapeError for more requests or tokens than there is room for.
        """
        num, has_adapters = len(spans), any(span.adapter for span in spans)
        if not 0 < num <= self._records.max_requests or any(not 0 < len(s.tokens) <= self.width for s in spans):
            limits = f"1 to {self._records.max_requests} windows of 1 to {self.width} tokens"
            raise ShapeError(f"windows of {[len(span.tokens) for span in spans]} tokens; a verify step takes {limits}")
        self._fill(spans)
        size = next((size for size in self.sizes if size >= num), num)
        replay = self.steps.get((size, has_adapters))
        if replay is not None:
            logits = replay()
        else:
            size = num
            logits = self._forward(num, None, tuple(span.adapter for span in spans) if has_adapters else None)
        self._unfolded = num, size
        ids, is_valid = self._drawn[:, :num]
        return Verified(logits.view(size, self.width, -1)[:num], ids, is_valid)

    @torch.inference_mode()
    def fold(self, accepted: Tensor) -> None:
        """Move the states of the last run's requests behind their first accepted[n] tokens: int64 [N] on the device, 0
        up to the tokens of its span. Writes the slots, none where nothing is accepted.

        Errors: InvariantError without a run that is not folded yet.
        """
        if self._unfolded is None or self._unfolded[0] != len(accepted):
            raise InvariantError(f"a fold of {len(accepted)} windows; the last run has {self._unfolded} to fold")
        num, size = self._unfolded
        self._unfolded = None
        if self._views.recurrent:
            kernels_for(self._device).kda_fold(
                self._records.of(size), self._views.conv, self._views.recurrent, self._rows[0, :size],
                F.pad(accepted, (0, size - num)),
            )  # fmt: skip

    def _fill(self, spans: Sequence[Span]) -> None:
        """One copy to the device; a second one where pages have changed."""
        size, width = self._page_size, self.width
        rows = _padding(self._records.max_requests, width, size)
        for n, span in enumerate(spans):
            count = len(span.tokens)
            positions = np.arange(span.start, span.end)
            rows[:NUM_FACTS, n] = span.slot, span.end, count, span.adapter
            rows[NUM_FACTS : NUM_FACTS + count, n] = span.tokens
            rows[NUM_FACTS + width :, n][:count] = span.pages[positions // size] * size + positions % size
        self._rows.copy_(pinned(torch.from_numpy(rows), self._device), non_blocking=True)
        self._table.fill(spans, size)

    def _forward(self, size: int, captured: AdapterRows | None, adapters: tuple[int, ...] | None) -> Tensor:
        """Logits [size * W, X] of the first windows of the buffers; the likeliest ids go to `_drawn`."""
        width, rows = self.width, self._rows[:, :size]
        slots, ends, lengths, _ = rows[:NUM_FACTS]
        tokens, kv_rows = (part.T.flatten() for part in torch.split(rows[NUM_FACTS:], width))
        table = self._table.rows[:size]
        cache = CacheMap(slots, kv_rows, table, self._page_size, self._views, lengths=ends)
        # where the spans start is in the buffers; the context only has to know that it is not at 0
        spans = Spans.build((width,) * size, (1,) * size, device=self._device)
        logits = self._model(
            ForwardContext(
                tokens, spans, cache, num_decodes=size, adapters=adapters, fixed_slots=self._adapter_slots,
                captured=captured, fake_quant=self._quant, windows=DraftWindows(lengths, self._records.of(size)),
            )
        )  # fmt: skip
        logits = logits.to(acc_dtype(logits.dtype))
        best, ids = logits.max(dim=-1)
        self._drawn[0, :size] = ids.view(size, width)
        self._drawn[1, :size] = torch.isfinite(best).view(size, width)
        return logits


def _padding(size: int, width: int, page_size: int) -> np.ndarray:
    """[NUM_FACTS + 2 W, size]: windows of token 0 in the sink slot that see what they write to the sink page."""
    rows = np.zeros((NUM_FACTS + 2 * width, size), dtype=np.int64)
    rows[1], rows[2] = width, width
    rows[NUM_FACTS + width :] = (np.arange(width) % page_size)[:, None]
    return rows
