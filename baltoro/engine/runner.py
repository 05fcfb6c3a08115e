"""run(): move bytes, fill a ForwardContext, forward, sample. Knows tensors and a Plan; no books.

In: a Plan. Out: a Result. Writes the arena: the plan's moves first, then what the layers write.
Invariants: everything it needs is in the plan; one plan at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baltoro.cache.pool import Pool
from baltoro.engine import sampler
from baltoro.engine.batch import Move, Plan, Result, Span, num_pages
from baltoro.engine.media import build_media
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.spans import Spans
from baltoro.model.config import K3Config
from baltoro.model.context import CacheMap, ForwardContext
from baltoro.model.state import CacheViews


class Model(Protocol):
    """What the engine asks of a model: logits [M, X] of the wanted rows."""

    config: K3Config

    def __call__(self, ctx: ForwardContext) -> Tensor: ...


class Runner:
    """Executes plans on one device."""

    def __init__(self, model: Model, pool: Pool, device: str | torch.device) -> None:
        self.model = model
        self.pool = pool
        self.device = torch.device(device)
        self.views = cache_views(pool)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result:
        """One step."""
        self._move(plan.moves)
        rows, targets = _logit_rows(plan.spans)
        logits = self.model(self.context(plan, rows + targets))
        logits = logits.to(acc_dtype(logits.dtype))
        found = sampler.sample(logits[: len(rows)], [span.draw for span in plan.spans if span.draw is not None])
        scores, done = [], len(rows)
        for span in plan.spans:
            if span.targets:
                part = logits[done : done + len(span.targets)]
                scores.append(sampler.score(part, span.targets, span.num_top))
                done += len(span.targets)
        return Result(found, scores)

    def context(self, plan: Plan, logit_rows: list[int]) -> ForwardContext:
        """What the model is told about the step."""
        spans, size = plan.spans, self.pool.layout.page_size
        tokens = [token for span in spans for token in span.tokens]
        table = _page_table(spans, size)
        lengths = tuple(len(span.tokens) for span in spans)
        cache = CacheMap(
            slots=self._tensor([span.slot for span in spans]),
            kv_rows=self._tensor(_kv_rows(spans, size)),
            page_table=self._tensor(table),
            page_size=size,
            views=self.views,
        )
        return ForwardContext(
            tokens=self._tensor(tokens),
            spans=Spans.build(lengths, [span.start for span in spans], device=self.device),
            cache=cache,
            num_decodes=plan.num_decodes,
            logit_rows=self._tensor(logit_rows),
            media=build_media(spans, self.model.config, self.device),
        )

    def _tensor(self, values: list[int] | np.ndarray) -> Tensor:
        """int64 on the device."""
        if isinstance(values, np.ndarray):
            return torch.from_numpy(values).to(self.device)
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if move.kind == "copy_slot":
                self.pool.copy_slot(move.source, move.target)
            elif move.kind == "copy_page":
                self.pool.copy_page(move.source, move.target)
            elif move.kind == "poison_slot":
                self.pool.poison_ids((), (move.target,))
            else:
                self.pool.poison_ids((move.target,), ())


def cache_views(pool: Pool) -> CacheViews:
    """The pool's views, one a layer, as the model wants them."""
    recurrent, conv = pool.slot_views() if pool.layout.slot_parts else (None, None)
    rows = pool.row_view()
    return CacheViews(
        recurrent=() if recurrent is None else recurrent.unbind(1),
        conv=() if conv is None else conv.unbind(1),
        kv=() if rows is None else rows.unbind(2),
    )


def _logit_rows(spans: Sequence[Span]) -> tuple[list[int], list[int]]:
    """(last rows of spans that draw, rows that score a prompt token), both in span order."""
    rows: list[int] = []
    targets: list[int] = []
    for span, end in zip(spans, accumulate(len(span.tokens) for span in spans), strict=True):
        if span.draw is not None:
            rows.append(end - 1)
        first = end - len(span.tokens) + span.first_target
        targets += range(first, first + len(span.targets))
    return rows, targets


def _page_table(spans: Sequence[Span], page_size: int) -> np.ndarray:
    """int64 [N, P]; unused entries name the sink."""
    counts = [num_pages(span, page_size) for span in spans]
    table = np.zeros((len(spans), max(counts)), dtype=np.int64)
    for row, span, count in zip(table, spans, counts, strict=True):
        row[:count] = np.frombuffer(span.pages, dtype=np.int64)[:count]
    return table


def _kv_rows(spans: Sequence[Span], page_size: int) -> np.ndarray:
    """int64 [T]: page * page_size + offset of each token."""
    parts = []
    for span in spans:
        positions = np.arange(span.start, span.end)
        pages = np.frombuffer(span.pages, dtype=np.int64)[positions // page_size]
        parts.append(pages * page_size + positions % page_size)
    return np.concatenate(parts)
