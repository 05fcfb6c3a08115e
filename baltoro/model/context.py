"""ForwardContext: everything a forward needs to know about its tokens. The model never sees a request.

Engine (serving) and trainer fill it in; the model reads it; nobody writes it. Training is the case without a cache:
every span then starts at 0 and sees only itself.

Layout of a serving step: the first `num_decodes` spans have length 1 and go through the recurrent and absorbed
kernels; the others go through the chunk and expanded kernels. Both kinds may be in one step. With `windows` the first
spans are draft windows of one width instead: verified, they read the state and do not move it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.copies import to_device
from baltoro.kernels.dispatch import Kernels, kernels_for
from baltoro.kernels.kda.fused_reference import Window
from baltoro.kernels.lora.rows import AdapterRows
from baltoro.kernels.spans import Borders, Spans
from baltoro.model.cache_map import CacheMap, Snapshot
from baltoro.model.routes import Routes


@dataclass(frozen=True, slots=True)
class Media:
    """Preprocessed pictures whose features replace the embeddings at the media-pad rows of this step.

    pixels  [sum t*h*w, 3, patch, patch]; grids one (t, h, w) in patches per item
    rows    int64 [X]: token rows that receive a feature
    picks   int64 [X]: which of the items' features (items concatenated, row-major) goes to each of them
    """

    pixels: Tensor
    grids: tuple[tuple[int, int, int], ...]
    rows: Tensor
    picks: Tensor


@dataclass(frozen=True, slots=True)
class FakeQuant:
    """Quantisation-aware switches for the routed experts: MXFP4 on weights, MXFP8 on the inputs of both products."""

    weights: bool = False
    activations: bool = False


@dataclass(frozen=True, slots=True)
class DraftWindows:
    """Verify: the decodes of the step are windows of W tokens each, the last one known and drafts behind it.

    lengths  int64 [decodes], tokens of each window that count, 1 .. W; what is behind them fills it up: no token that
             counts sees it, and its logits mean nothing
    records  inputs of all KDA layers, [L, decodes, W, ..]: filled by the step, for the fold that moves the states
    """

    lengths: Tensor
    records: Window

    @property
    def width(self) -> int:
        """W."""
        return self.records.k.shape[2]


@dataclass(frozen=True)
class ForwardContext:
    """T packed tokens of N spans.

    tokens       int64 [T]
    spans        lengths, absolute starts
    cache        None in training
    num_decodes  leading spans of length 1 (draft windows: of W) that take the decode kernels; 0 in training
    logit_rows   int64 [M] rows whose logits are wanted; None: all
    adapters     adapter slot of each span, 0 for none; None: none in the whole step
    fixed_slots  terms of adapters in fixed form for so many slots (`AdapterRows.fixed`); 0: row by row
    captured     adapters of the rows where only the device knows them, in fixed form: decodes of a captured step
    windows      the decodes are draft windows: their KDA states stay as they are
    routes       experts to be taken instead of those that the routers would choose (training); None: they choose
    """

    tokens: Tensor
    spans: Spans
    cache: CacheMap | None = None
    num_decodes: int = 0
    logit_rows: Tensor | None = None
    media: Media | None = None
    fake_quant: FakeQuant = field(default_factory=FakeQuant)
    is_training: bool = False
    adapters: tuple[int, ...] | None = None
    fixed_slots: int = 0
    captured: AdapterRows | None = None
    windows: DraftWindows | None = None
    routes: Routes | None = None

    def __post_init__(self) -> None:
        if self.tokens.shape != (self.spans.num_tokens,):
            raise ShapeError(f"{tuple(self.tokens.shape)} tokens for {self.spans.num_tokens} rows of spans")
        if any(n != self.window for n in self.spans.lengths[: self.num_decodes]):
            raise ShapeError(f"the first {self.num_decodes} spans are decodes and must have length {self.window}")
        if self.windows is not None and (self.cache is None or self.cache.lengths is None):
            raise ShapeError("draft windows need a cache that says how many keys their last tokens see")
        if self.cache is None and any(self.spans.starts):
            raise ShapeError("a span that starts after 0 needs a cache")
        if any(start == 0 for start in self.spans.starts[: self.num_decodes]):
            raise ShapeError("a span that starts at 0 has no state yet: it is a prefill, not a decode")
        if self.num_decodes and self.cache is None:
            raise ShapeError("decode spans need a cache")
        if self.adapters is not None and len(self.adapters) != len(self.spans):
            raise ShapeError(f"{len(self.adapters)} adapter slots for {len(self.spans)} spans")
        if self.routes is not None and len(self.routes.ids) != len(self.tokens):
            raise ShapeError(f"routes of {len(self.routes.ids)} tokens for {len(self.tokens)} rows")
        if self.cache is not None:
            self._check_snapshots(self.cache.snapshots)

    def _check_snapshots(self, snapshots: tuple[Snapshot, ...]) -> None:
        for taken in snapshots:
            if not self.num_decodes <= taken.span < len(self.spans):
                raise ShapeError(f"{taken} is of no prefill span; after a decode step copy the slot")
            if not 0 < taken.length <= self.spans.lengths[taken.span]:
                raise ShapeError(f"{taken} lies outside its span of {self.spans.lengths[taken.span]} tokens")
        if len({taken.slot for taken in snapshots}) < len(snapshots):
            raise ShapeError(f"two snapshots would be written to one slot: {snapshots}")

    @property
    def window(self) -> int:
        """Tokens of each decode: 1, or W of draft windows."""
        return 1 if self.windows is None else self.windows.width

    @property
    def num_decode_rows(self) -> int:
        """Rows of the decodes, which come first."""
        return self.num_decodes * self.window

    @cached_property
    def kernels(self) -> Kernels:
        """What the dispatch table picked for the device of this step."""
        return kernels_for(self.tokens.device)

    @cached_property
    def adapter_rows(self) -> AdapterRows | None:
        """Adapters of the T tokens; None if there are none."""
        return self._rows(0, len(self.spans), self.spans.lengths)

    @cached_property
    def decode_adapter_rows(self) -> AdapterRows | None:
        """Adapters of the decode rows."""
        return self._rows(0, self.num_decodes, self.spans.lengths[: self.num_decodes])

    @cached_property
    def key_adapter_rows(self) -> AdapterRows | None:
        """Adapters of the keys that prefill spans see, packed span by span: a key is seen through its reader's."""
        return self._rows(self.num_decodes, len(self.spans), self.prefill.ends)

    def _rows(self, first: int, last: int, lengths: tuple[int, ...]) -> AdapterRows | None:
        if self.captured is not None:
            return self.captured
        if self.adapters is None:
            return None
        device = self.tokens.device
        if not self.fixed_slots:
            return AdapterRows.build(self.adapters[first:last], lengths, device)
        each = torch.tensor(self.adapters[first:last], dtype=torch.int64).repeat_interleave(
            torch.tensor(lengths, dtype=torch.int64)
        )
        return AdapterRows.fixed(to_device(each, device), self.fixed_slots) if len(each) else None

    @cached_property
    def prefill(self) -> Spans:
        """The spans after the decodes."""
        return self.spans.select(self.num_decodes, len(self.spans))

    @cached_property
    def decode_lengths(self) -> Tensor:
        """int64 [num_decodes]: keys that each decode token sees, itself included."""
        if self.cache is not None and self.cache.lengths is not None:
            return self.cache.lengths
        return to_device(torch.tensor(self.spans.ends[: self.num_decodes], dtype=torch.int64), self.tokens.device)

    @cached_property
    def window_turn(self) -> tuple[Tensor, Tensor]:
        """int64 [num_decode_rows] each: rows of the windows turned until their last token that counts is the last, and
        the way back. Attention lets the last row see all keys; keys behind those that count were never written."""
        assert self.windows is not None
        width, lengths = self.windows.width, self.windows.lengths.unsqueeze(1)
        place = torch.arange(width, device=lengths.device)
        first = torch.arange(self.num_decodes, device=lengths.device).unsqueeze(1) * width
        return (first + (place + lengths) % width).flatten(), (first + (place - lengths) % width).flatten()

    @cached_property
    def prefill_is_fresh(self) -> Tensor:
        """bool [number of prefill spans]: which begin a request and find an empty state."""
        return to_device(torch.tensor([start == 0 for start in self.prefill.starts]), self.tokens.device)

    @property
    def is_prefill_fresh(self) -> bool:
        """Whether no prefill span has anything before it in the cache."""
        return not any(self.prefill.starts)

    @cached_property
    def prefill_borders(self) -> Borders:
        """Points inside the prefill spans, counted among these, whose states are kept."""
        return tuple((taken.span - self.num_decodes, taken.length) for taken in self._snapshots(is_inside=True))

    @cached_property
    def state_slots(self) -> Tensor:
        """int64 [N + B]: slots of the states that prefill leaves, one a span, then one a border."""
        assert self.cache is not None
        slots = self.cache.slots[self.num_decodes :]
        inside = [taken.slot for taken in self._snapshots(is_inside=True)]
        return torch.cat([slots, to_device(torch.tensor(inside), slots.device)]) if inside else slots

    @cached_property
    def end_copies(self) -> tuple[Tensor, Tensor] | None:
        """(slots of spans, slots of snapshots) int64, for the snapshots at the end of their span."""
        taken = self._snapshots(is_inside=False)
        if not taken:
            return None
        assert self.cache is not None
        slots = self.cache.slots
        spans, targets = [one.span for one in taken], [one.slot for one in taken]
        return slots[to_device(torch.tensor(spans), slots.device)], to_device(torch.tensor(targets), slots.device)

    def _snapshots(self, *, is_inside: bool) -> list[Snapshot]:
        """Those inside their span, or those at its end."""
        taken = () if self.cache is None else self.cache.snapshots
        return [one for one in taken if (one.length < self.spans.lengths[one.span]) == is_inside]

    @cached_property
    def kv_places(self) -> tuple[Tensor, Tensor]:
        """(page, offset in page), int64 [T] each: where this step's rows go."""
        assert self.cache is not None
        return self.cache.places(self.cache.kv_rows)

    @cached_property
    def prefill_key_places(self) -> tuple[Tensor, Tensor]:
        """(page, offset), int64 [S] each: every row that the prefill spans see, span by span, oldest first."""
        assert self.cache is not None
        size, table, total = self.cache.page_size, self.cache.page_table[self.num_decodes :], sum(self.prefill.ends)
        ends = to_device(torch.tensor(self.prefill.ends, dtype=torch.int64), table.device)
        span = torch.arange(len(ends), device=table.device).repeat_interleave(ends, output_size=total)
        place = torch.arange(total, device=table.device) - (ends.cumsum(0) - ends)[span]
        return table[span, place // size], place % size


def train_context(
    tokens: Tensor,
    lengths: tuple[int, ...],
    *,
    fake_quant: FakeQuant | None = None,
    media: Media | None = None,
    adapters: tuple[int, ...] | None = None,
    routes: Routes | None = None,
) -> ForwardContext:
    """The context of a packed training batch: documents of `lengths` tokens, no cache, logits everywhere."""
    spans, quant = Spans.build(lengths, device=tokens.device), fake_quant or FakeQuant()
    return ForwardContext(
        tokens, spans, media=media, fake_quant=quant, is_training=True, adapters=adapters, routes=routes
    )
