"""MicroBatch -> Prepared: all that a forward and its losses need of a batch, worked out once, on the host.

In: packed samples on the CPU. Out: tensors that go to the device in copies that do not wait, and the sums that only the
host must know (denominators). What layers derive from the spans alone is made here too, so that no layer asks the
device for it or builds it anew.
Invariants: nothing here reads a tensor on a device; a prepared batch trains to the same numbers on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from baltoro.kernels.conv.reference import layout_of, points_of
from baltoro.kernels.kda.grid import CHUNK, Grid
from baltoro.kernels.mla.padded import padding_of
from baltoro.kernels.spans import Spans, map_tensors
from baltoro.model.config import K3Config
from baltoro.model.context import FakeQuant, ForwardContext, Media
from baltoro.trainer.media import media_of
from baltoro.trainer.sample import MicroBatch


@dataclass(frozen=True, slots=True)
class Prepared:
    """T tokens of N spans, with S corpora.

    tokens, targets int64 [T]; weights float32 [T]
    next_tokens     per MTP step int64 [T]: the token that the step reads beside each row
    ahead           per MTP step (targets int64 [T], weights float32 [T]): what it predicts
    source_rows     int64 [T], index of each row's corpus among `sources`
    source_weights  sum of the weights of each corpus; total_weight, ahead_weight: of all targets, of all MTP targets
    """

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    spans: Spans
    next_tokens: tuple[Tensor, ...]
    ahead: tuple[tuple[Tensor, Tensor], ...]
    source_rows: Tensor
    media: Media | None
    sources: tuple[str, ...]
    source_weights: tuple[float, ...]
    total_weight: float
    ahead_weight: float

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.spans.num_tokens

    def context(self, quant: FakeQuant) -> ForwardContext:
        """What the model reads."""
        return ForwardContext(self.tokens, self.spans, media=self.media, fake_quant=quant, is_training=True)

    def to(self, device: torch.device) -> Prepared:
        """The same batch on `device`; copies do not wait where the memory is pinned."""
        if device == self.tokens.device:
            return self
        return self._changed(lambda t: t.to(device, non_blocking=True), self.spans.to(device))

    def pinned(self) -> Prepared:
        """The same batch in memory that a device copies from by itself."""
        return self._changed(torch.Tensor.pin_memory, self.spans.pinned())

    def _changed(self, change: Callable[[Tensor], Tensor], spans: Spans) -> Prepared:
        media = self.media
        if media is not None:
            media = replace(media, pixels=change(media.pixels), rows=change(media.rows), picks=change(media.picks))
        return replace(
            self,
            tokens=change(self.tokens),
            targets=change(self.targets),
            weights=change(self.weights),
            spans=spans,
            next_tokens=map_tensors(change, self.next_tokens),
            ahead=map_tensors(change, self.ahead),
            source_rows=change(self.source_rows),
            media=media,
        )


def prepare(batch: MicroBatch, config: K3Config, sources: Sequence[str] | None = None) -> Prepared:
    """`sources`: the corpora that are told apart, all of the batch's among them; None: the batch's own."""
    names = tuple(sorted(set(batch.sources)) if sources is None else sources)
    spans = Spans.build(batch.lengths)
    _warm(spans, config)
    depth = config.num_mtp_layers
    found = [batch.ahead(distance) for distance in range(depth + 1)]
    rows = np.repeat([names.index(name) for name in batch.sources], batch.lengths)
    weights = batch.weights.numpy().astype(np.float64)
    return Prepared(
        tokens=batch.tokens,
        targets=batch.targets,
        weights=batch.weights,
        spans=spans,
        next_tokens=tuple(targets.clamp(min=0) for targets, _ in found[:depth]),
        ahead=tuple(found[1:]),
        source_rows=torch.from_numpy(rows),
        media=media_of(batch, config),
        sources=names,
        source_weights=tuple(np.bincount(rows, weights, minlength=len(names)).tolist()),
        total_weight=float(weights.sum()),
        ahead_weight=float(sum(w.numpy().astype(np.float64).sum() for _, w in found[1:])),
    )


def _warm(spans: Spans, config: K3Config) -> None:
    """Make on the host what the layers will ask the spans for."""
    layout_of(spans, config.conv_size - 1)
    points_of(spans, (), config.conv_size - 1)
    padding_of(spans)
    Grid.of(spans, CHUNK)
    _ = spans.positions, spans.offsets_device, spans.offsets_wide
