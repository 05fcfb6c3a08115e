"""run(): move bytes, fill a ForwardContext, forward, sample. Knows tensors and a Plan; no books.

In: plans, in order. Out: one Ticket each, whose `wait` gives the Result. Writes the arena: a plan's moves first, then
what the layers write, then the copies that come behind them.
Invariants: everything it needs is in the plan, but for sampled ids that never left the device: a plan made while
another was in flight names them by their place among that one's draws. Plans run one after the other on one stream.
`launch` returns when all is queued: on a GPU long before the step is done, on a CPU, which is host and device in one,
when it is done. A thread for the CPU was tried: handing over and sharing the interpreter cost more than it hid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baltoro.cache.host_store import HostStore
from baltoro.cache.pool import Pool
from baltoro.cache.windows import WindowRecords
from baltoro.engine import sampler
from baltoro.engine.batch import Draw, Plan, Result, Scored, Span, num_pages
from baltoro.engine.graphs import Backend, DecodeGraphs, Report, StepSet, capture_all
from baltoro.engine.media import build_media
from baltoro.engine.moves import Mover
from baltoro.engine.routes import Reading, split_rows
from baltoro.engine.spec.verify import Verifier
from baltoro.kernels.copies import to_device
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.spans import Spans
from baltoro.model.cache_map import CacheMap, Snapshot
from baltoro.model.config import K3Config
from baltoro.model.context import FakeQuant, ForwardContext
from baltoro.model.lora import AdapterBank
from baltoro.model.state import CacheViews


class Model(Protocol):
    """What the engine asks of a model: logits [M, X] of the wanted rows, and states at multiples of `state_chunk`."""

    config: K3Config

    @property
    def state_chunk(self) -> int: ...

    def __call__(self, ctx: ForwardContext) -> Tensor: ...


class Ticket(Protocol):
    """A step under way."""

    def wait(self) -> Result:
        """Block until it is done. Errors: whatever it raised."""
        ...


class _Done:
    """A step whose result is made when somebody asks."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish = finish

    def wait(self) -> Result:
        return self._finish()


class Runner:
    """Executes plans on one device."""

    def __init__(
        self,
        model: Model,
        pool: Pool,
        device: str | torch.device,
        *,
        host: HostStore | None = None,
        bank: AdapterBank | None = None,
        fixed_slots: int = 0,
        quant: FakeQuant | None = None,
    ) -> None:
        """`fixed_slots`: of the bank, where terms of adapters are had in fixed form; 0: row by row. `quant`: rounding
        of what the routed experts read."""
        self.model = model
        self.quant = quant or FakeQuant()
        self.fixed_slots = fixed_slots
        self.graphs: DecodeGraphs | None = None
        self.verifier: Verifier | None = None
        self._bank = bank
        self.pool = pool
        self.device = torch.device(device)
        self.views, self._routes = cache_views(pool, model.config)
        self._mover = Mover(pool, host)
        self._ids: Tensor | None = None  # drawn by the last plan issued

    def launch(self, plan: Plan) -> Ticket:
        """Start one step."""
        return _Done(self._issue(plan))

    def run(self, plan: Plan) -> Result:
        """One step, from beginning to end."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def _issue(self, plan: Plan) -> Callable[[], Result]:
        """Queue everything on the device; what is returned reads the result."""
        self._mover.move(plan.moves)
        for install in plan.installs:
            assert self._bank is not None, "there are no adapter slots"
            self._bank.install(install.slot, install.weights)
        rows, targets = _logit_rows(plan.spans)
        if not plan.spans:
            return lambda: Result(())
        logits, size = self._forward(plan, rows + targets)
        self._mover.move(plan.after)
        logits = logits.to(acc_dtype(logits.dtype))
        draws = [span.draw for span in plan.spans if span.draw is not None]
        drawn = self._draw(logits[: len(rows)], draws, is_captured=size is not None) if draws else None
        self._ids = None if drawn is None else drawn.ids
        scores, done = [], len(rows)
        for span in plan.spans:
            if span.targets:
                part = logits[done : done + len(span.targets)]
                scores.append(sampler.score(part, span.targets, span.num_top).to_host())
                done += len(span.targets)
        on_host = None if drawn is None else drawn.to_host()
        reading = None
        if self._routes is not None and any(span.routes_from is not None for span in plan.spans):
            reading = Reading(self._routes, plan.spans, self.pool.layout.page_size)
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()

        def finish() -> Result:
            if event is not None:
                event.synchronize()
            found = [] if on_host is None else on_host.found()
            scored = [Scored(*score.lists()) for score in scores]
            return Result(found, scored, () if reading is None else reading.parts())

        return finish

    def prepare_verify(self, records: WindowRecords, max_pages: int) -> None:
        """From now on draft windows can be verified, of requests of `max_pages` pages with theirs. Before `capture`."""
        self.verifier = Verifier(
            self.model,
            self.views,
            records,
            page_size=self.pool.layout.page_size,
            max_pages=max_pages,
            device=self.device,
            adapter_slots=self.fixed_slots,
            quant=self.quant,
        )

    def capture(self, max_batch: int, max_pages: int, backend: Backend, report: Report | None = None) -> None:
        """From now on plans of at most `max_batch` decodes, and of `max_pages` pages each, replay captured steps, and
        so do verify steps of at most `max_batch` windows."""
        self.graphs = DecodeGraphs(
            self.model,
            self.views,
            page_size=self.pool.layout.page_size,
            max_pages=max_pages,
            max_batch=max_batch,
            device=self.device,
            adapter_slots=self.fixed_slots,
            quant=self.quant,
        )
        sets: list[StepSet] = [self.graphs]
        if self.verifier is not None:
            self.verifier.plan_captures(max_batch)
            sets.insert(0, self.verifier)  # steps of more rows come first
        capture_all(sets, backend, report)

    def _draw(self, logits: Tensor, draws: Sequence[Draw], *, is_captured: bool) -> sampler.Drawn | sampler.Likeliest:
        """Ids of the rows: a captured step has found the likeliest ones already."""
        if is_captured and sampler.are_likeliest(draws):
            assert self.graphs is not None
            return sampler.Likeliest(self.graphs.drawn[:, : len(draws)])
        return sampler.draw_ids(logits, draws)

    def _forward(self, plan: Plan, rows: list[int]) -> tuple[Tensor, int | None]:
        """Logits of the rows wanted: a replay where a graph fits, whose size comes along, else a forward."""
        size = None if self.graphs is None else self.graphs.size_for(plan)
        if self.graphs is None or size is None:
            return self.model(self.context(plan, rows)), None
        is_there = self._ids is not None and self._ids.data_ptr() == self.graphs.drawn.data_ptr()
        return self.graphs.run(plan, None if is_there else self._ids, size), size

    def context(self, plan: Plan, logit_rows: list[int]) -> ForwardContext:
        """What the model is told about the step."""
        spans, size = plan.spans, self.pool.layout.page_size
        lengths = tuple(len(span.tokens) for span in spans)
        snapshots = [Snapshot(n, taken.length, taken.slot) for n, span in enumerate(spans) for taken in span.snapshots]
        cache = CacheMap(
            slots=self._tensor([span.slot for span in spans]),
            kv_rows=self._tensor(_kv_rows(spans, size)),
            page_table=self._tensor(_page_table(spans, size)),
            page_size=size,
            views=self.views,
            snapshots=tuple(snapshots),
        )
        return ForwardContext(
            tokens=self._tokens(spans),
            spans=Spans.build(lengths, [span.start for span in spans], device=self.device),
            cache=cache,
            num_decodes=plan.num_decodes,
            logit_rows=self._tensor(logit_rows),
            media=build_media(spans, self.model.config, self.device),
            adapters=tuple(span.adapter for span in spans) if any(span.adapter for span in spans) else None,
            fixed_slots=self.fixed_slots,
            fake_quant=self.quant,
        )

    def _tokens(self, spans: Sequence[Span]) -> Tensor:
        """int64 [T]; those that the step before this one sampled are filled in on the device."""
        tokens = self._tensor([token for span in spans for token in span.tokens])
        relayed = [(n, span.source) for n, span in enumerate(spans) if span.source is not None]
        if relayed:  # decodes come first, so the span's number is its row
            assert self._ids is not None
            rows, sources = zip(*relayed, strict=True)
            tokens[self._tensor(list(rows))] = self._ids[self._tensor(list(sources))]
        return tokens

    def _tensor(self, values: list[int] | np.ndarray) -> Tensor:
        """int64 on the device; on a GPU only queued."""
        there = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=torch.int64)
        return to_device(there, self.device)


def cache_views(pool: Pool, config: K3Config) -> tuple[CacheViews, Tensor | None]:
    """The pool's views, one a layer, as the model wants them; and routes of all layers, int16 [rows, Y, A], where rows
    have them behind their KV."""
    recurrent, conv = pool.slot_views() if pool.layout.slot_parts else (None, None)
    rows, routes, row = pool.row_view(), None, pool.layout.row
    if rows is not None and row is not None and len(row.shape) == 1:
        rows, routes = split_rows(rows, config)
    views = CacheViews(
        recurrent=() if recurrent is None else recurrent.unbind(1),
        conv=() if conv is None else conv.unbind(1),
        kv=() if rows is None else rows.unbind(2),
        routes=() if routes is None else routes.unbind(1),
    )
    return views, routes


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
        row[:count] = span.pages[:count]
    return table


def _kv_rows(spans: Sequence[Span], page_size: int) -> np.ndarray:
    """int64 [T]: page * page_size + offset of each token."""
    parts = []
    for span in spans:
        positions = np.arange(span.start, span.end)
        pages = span.pages[positions // page_size]
        parts.append(pages * page_size + positions % page_size)
    return np.concatenate(parts)
