"""CUDA graphs of decode steps, one per padded batch size: captured at the start, replayed when a plan is decodes only.

In: a plan of decodes and its tokens on the device. Out: logits of its rows, in memory that the next replay overwrites.
Every size shares the input buffers (a graph of B rows reads their first B) and one memory pool; the largest is captured
first, so that the others find room in it. Rows that pad a batch are a token 0 that sees one key, write page 0 and
slot 0, the sinks, and their logits are dropped.
With adapter slots every size has a second graph, for plans in which a row has an adapter: slots are in the buffers too,
factors where they always are, so an installed version is what the next replay reads.
Invariants: a captured step reads nothing of the host; the context of a capture is made inside it, so that whatever it
derives from the buffers is derived again in every replay. Pictures, prompt scores and prefills run eagerly.
Not here: sampling (it follows, eagerly), copies of a plan (they come before).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baltoro.engine.batch import Plan, Span, num_pages
from baltoro.kernels.lora.rows import AdapterRows
from baltoro.kernels.spans import Spans
from baltoro.model.context import CacheMap, ForwardContext
from baltoro.model.state import CacheViews

Step = Callable[[], Tensor]
Report = Callable[[int, int], None]
"""Told (captured, of how many) after each graph."""
WARM_UPS = 2
"""Runs before a capture: compile kernels, make handles."""


class Backend(Protocol):
    """Turns a step into one that costs a launch."""

    def capture(self, step: Step) -> Step:
        """A callable that does what `step` did, reading its input buffers anew and writing the same output."""
        ...


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
        backend: Backend,
        report: Report | None = None,
        adapter_slots: int = 0,
    ) -> None:
        """`max_pages`: of one request. `max_batch`: decodes of the largest graph. `adapter_slots`: 0 leaves plans with
        adapters to eager steps. Captures everything."""
        self._model, self._views, self._page_size, self._device = model, views, page_size, device
        self.sizes = padded_sizes(max_batch)
        self._adapter_slots = adapter_slots
        # token, slot, KV row, keys in view, adapter slot
        self._rows = torch.zeros(5, self.sizes[-1], dtype=torch.int64, device=device)
        self._table = torch.zeros(self.sizes[-1], max_pages, dtype=torch.int64, device=device)
        self._rows[3] = 1
        self._steps: dict[tuple[int, bool], Step] = {}
        kinds = (False, True) if adapter_slots else (False,)
        wanted = [(size, has_adapters) for size in reversed(self.sizes) for has_adapters in kinds]
        with torch.inference_mode():
            for done, (size, has_adapters) in enumerate(wanted, start=1):
                self._steps[size, has_adapters] = backend.capture(self._step(size, has_adapters))
                if report is not None:
                    report(done, len(wanted))

    def size_for(self, plan: Plan) -> int | None:
        """The graph that a plan runs in; None: it runs eagerly."""
        spans = plan.spans
        if not spans or plan.num_decodes != len(spans) or len(spans) > self.sizes[-1]:
            return None
        if any(span.media or span.targets or span.draw is None for span in spans):
            return None
        if not self._adapter_slots and any(span.adapter for span in spans):
            return None
        if max(num_pages(span, self._page_size) for span in spans) > self._table.shape[1]:
            return None
        return next(size for size in self.sizes if size >= len(spans))

    def run(self, plan: Plan, tokens: Tensor, size: int) -> Tensor:
        """Logits [N, X] of the plan's N decodes; tokens int64 [N] on the device. Writes the arena."""
        self._fill(plan.spans, tokens)
        return self._steps[size, any(span.adapter for span in plan.spans)]()[: len(plan.spans)]

    def _fill(self, spans: Sequence[Span], tokens: Tensor) -> None:
        count, size = len(spans), self._page_size
        used = [num_pages(span, size) for span in spans]
        host = np.zeros((count, 4 + max(used)), dtype=np.int64)
        for row, span, pages in zip(host, spans, used, strict=True):
            place = span.end - 1
            row[:4] = span.slot, span.pages[place // size] * size + place % size, span.end, span.adapter
            row[4 : 4 + pages] = span.pages[:pages]
        found = self._to_device(host)
        self._rows[:, count:] = 0
        self._rows[3, count:] = 1
        self._rows[0, :count] = tokens
        self._rows[1:, :count] = found[:, :4].T
        self._table.zero_()
        self._table[:count, : max(used)] = found[:, 4:]

    def _to_device(self, values: np.ndarray) -> Tensor:
        """One copy; on a GPU it is only queued."""
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor

    def _step(self, size: int, has_adapters: bool) -> Step:
        """The forward of `size` rows of the buffers."""

        def step() -> Tensor:
            tokens, slots, kv_rows, lengths, adapters = self._rows[:, :size]
            cache = CacheMap(slots, kv_rows, self._table[:size], self._page_size, self._views, lengths=lengths)
            # where the spans start is in the buffers; the context only has to know that it is not at 0
            spans = Spans.build((1,) * size, (1,) * size, device=self._device)
            captured = AdapterRows.fixed(adapters, self._adapter_slots) if has_adapters else None
            return self._model(ForwardContext(tokens, spans, cache, num_decodes=size, captured=captured))

        return step


def padded_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes that get a graph, ascending: powers of two up to 8, then steps of 8 or an eighth, and `largest`."""
    sizes, size = [], 1
    while size < largest:
        sizes.append(size)
        size += size if size < 8 else max(8, size // 64 * 8)
    return (*sizes, largest)
