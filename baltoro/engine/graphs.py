"""CUDA graphs of steps, one per padded batch size: captured at the start, replayed when a plan is decodes only.

In: a plan of decodes. Out: logits of its rows and the likeliest ids, in memory that the next replay overwrites.
Every size shares the input buffers (a graph of B rows reads their first B); all graphs, those of verify steps
(`spec/verify.py`) too, share one memory pool, the largest captured first, so that the others find room in it. Rows that
pad a batch are a token 0 that sees one key, write page 0 and slot 0, the sinks, and their logits are dropped.
With adapter slots every size has a second graph, for plans in which a row has an adapter: slots are in the buffers too,
factors where they always are, so an installed version is what the next replay reads.
Invariants: a captured step reads nothing of the host; the context of a capture is made inside it, so that whatever it
derives from the buffers is derived again in every replay. Pictures, prompt scores and prefills run eagerly.
A decode whose token is still on the device names its place among the ids drawn before; the step itself looks it up in
`drawn`, where it leaves the likeliest id of each row: greedy steps then follow each other without a word between.
Not here: other sampling (it follows, eagerly), copies of a plan (they come before).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baltoro.engine.batch import Plan, Span, num_pages
from baltoro.kernels.copies import pinned, to_device
from baltoro.kernels.lora.rows import AdapterRows
from baltoro.kernels.precision import acc_dtype
from baltoro.kernels.spans import Spans
from baltoro.model.cache_map import CacheMap
from baltoro.model.context import FakeQuant, ForwardContext
from baltoro.model.state import CacheViews

Step = Callable[[], Tensor]
Key = tuple[int, bool]
"""Which graph: (padded batch size, whether a row has an adapter)."""
Report = Callable[[int, int], None]
"""Told (captured, of how many) after each graph."""
WARM_UPS = 2
"""Runs before a capture: compile kernels, make handles."""


class Backend(Protocol):
    """Turns a step into one that costs a launch."""

    def capture(self, step: Step) -> Step:
        """A callable that does what `step` did, reading its input buffers anew and writing the same output."""
        ...


class StepSet(Protocol):
    """Steps of one kind: those wanted, and those that are captured."""

    steps: dict[Key, Step]

    def wanted(self) -> list[Key]:
        """The largest first."""
        ...

    def step(self, key: Key) -> Step:
        """One of them, to be captured."""
        ...


def capture_all(sets: Sequence[StepSet], backend: Backend, report: Report | None = None) -> None:
    """Capture every step that the sets want, set by set; the one with the largest steps comes first."""
    wanted = [(one, key) for one in sets for key in one.wanted()]
    with torch.inference_mode():
        for done, (one, key) in enumerate(wanted, start=1):
            one.steps[key] = backend.capture(one.step(key))
            if report is not None:
                report(done, len(wanted))


class CudaBackend:
    """torch's CUDA graphs, all in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Step) -> Step:
        """Errors: RuntimeError of torch if the step waits for the device."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = step()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class PageTable:
    """int64 [rows, columns] on the device: pages of each request, in the order of a batch; sinks around them."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.rows = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self._shown = np.zeros((0, 0), dtype=np.int64)  # what it holds; zeros around it

    def fill(self, spans: Sequence[Span], page_size: int) -> None:
        """One copy to the device where pages have changed since the last batch, else none."""
        used = [num_pages(span, page_size) for span in spans]
        table = np.zeros((len(spans), max(used)), dtype=np.int64)
        for row, span, pages in zip(table, spans, used, strict=True):
            row[:pages] = span.pages[:pages]
        if table.shape != self._shown.shape or not np.array_equal(table, self._shown):
            self.rows[: len(self._shown), : self._shown.shape[1]] = 0
            self.rows[: len(spans), : table.shape[1]] = to_device(torch.from_numpy(table), self.rows.device)
            self._shown = table


class DecodeGraphs:
    """The captured steps and their input buffers. Used by one runner, on one stream."""

    def __init__(
        self,
        model: Callable[[ForwardContext], Tensor],
        views: CacheViews,
        *,
        page_size: int,
        max_pages: int,
        max_batch: int,
        device: torch.device,
        adapter_slots: int = 0,
        quant: FakeQuant | None = None,
    ) -> None:
        """`max_pages`: of one request. `max_batch`: decodes of the largest graph. `adapter_slots`: 0 leaves plans with
        adapters to eager steps. `capture_all` captures."""
        self._model, self._views, self._page_size, self._device = model, views, page_size, device
        self.sizes = padded_sizes(max_batch)
        self._adapter_slots, self._quant = adapter_slots, quant or FakeQuant()
        largest = self.sizes[-1]
        # token, slot, KV row, keys in view, place of the token among the ids drawn before or -1, adapter slot
        self._rows = torch.from_numpy(_padding(largest)).to(device)
        self._table = PageTable(largest, max_pages, device)
        self.drawn = torch.zeros(2, largest, dtype=torch.int64, device=device)
        self.steps: dict[Key, Step] = {}

    def wanted(self) -> list[Key]:
        """Every size, the largest first; a second graph of each for rows with adapters, if there are slots."""
        return keys_of(self.sizes, has_adapters=self._adapter_slots > 0)

    def size_for(self, plan: Plan) -> int | None:
        """The graph that a plan runs in; None: it runs eagerly."""
        spans = plan.spans
        if not spans or plan.num_decodes != len(spans) or len(spans) > self.sizes[-1]:
            return None
        if any(span.media or span.targets or span.draw is None for span in spans):
            return None
        if not self._adapter_slots and any(span.adapter for span in spans):
            return None
        if max(num_pages(span, self._page_size) for span in spans) > self._table.rows.shape[1]:
            return None
        if any(span.source is not None and span.source >= self.sizes[-1] for span in spans):
            return None
        return next(size for size in self.sizes if size >= len(spans))

    def run(self, plan: Plan, ids: Tensor | None, size: int) -> Tensor:
        """Logits [N, X], in the accumulate dtype, of the plan's N decodes; `drawn` [2, N] then has the likeliest id of
        each and whether it has a finite logit. `ids`: those drawn by the plan before, if not by a graph. Writes the
        arena."""
        if ids is not None:
            count = min(len(ids), self.sizes[-1])
            self.drawn[0, :count] = ids[:count]
        self._fill(plan.spans)
        return self.steps[size, any(span.adapter for span in plan.spans)]()[: len(plan.spans)]

    def _fill(self, spans: Sequence[Span]) -> None:
        """One copy to the device; a second one where pages have changed."""
        size = self._page_size
        rows = _padding(self.sizes[-1])
        for n, span in enumerate(spans):
            end = span.start + 1
            place = span.start // size
            rows[:, n] = (
                span.tokens[0], span.slot, span.pages[place] * size + span.start - place * size, end,
                -1 if span.source is None else span.source, span.adapter,
            )  # fmt: skip
        self._rows.copy_(pinned(torch.from_numpy(rows), self._device), non_blocking=True)
        self._table.fill(spans, size)

    def step(self, key: Key) -> Step:
        """The forward of so many rows of the buffers."""
        size, has_adapters = key

        def step() -> Tensor:
            given, slots, kv_rows, lengths, places, adapters = self._rows[:, :size]
            tokens = torch.where(places < 0, given, self.drawn[0].index_select(0, places.clamp(min=0)))
            cache = CacheMap(slots, kv_rows, self._table.rows[:size], self._page_size, self._views, lengths=lengths)
            # where the spans start is in the buffers; the context only has to know that it is not at 0
            spans = Spans.build((1,) * size, (1,) * size, device=self._device)
            captured = AdapterRows.fixed(adapters, self._adapter_slots) if has_adapters else None
            logits = self._model(
                ForwardContext(tokens, spans, cache, num_decodes=size, captured=captured, fake_quant=self._quant)
            )
            logits = logits.to(acc_dtype(logits.dtype))
            best, ids = logits.max(dim=-1)
            self.drawn[0, :size] = ids
            self.drawn[1, :size] = torch.isfinite(best)
            return logits

        return step


def _padding(size: int) -> np.ndarray:
    """[6, size]: token 0 that writes to the sinks and sees one key."""
    rows = np.zeros((6, size), dtype=np.int64)
    rows[3], rows[4] = 1, -1
    return rows


def padded_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes that get a graph, ascending: powers of two up to 8, then steps of 8 or an eighth, and `largest`."""
    sizes, size = [], 1
    while size < largest:
        sizes.append(size)
        size += size if size < 8 else max(8, size // 64 * 8)
    return (*sizes, largest)


def keys_of(sizes: Sequence[int], *, has_adapters: bool) -> list[Key]:
    """Of graphs of these sizes, the largest first."""
    return [(size, kind) for size in reversed(sizes) for kind in ((False, True) if has_adapters else (False,))]
