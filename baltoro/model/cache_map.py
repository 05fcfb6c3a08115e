"""Where the spans of a step live in the cache, and which of their states are kept besides.

The engine's runner fills it in; the layers read it; nobody writes it. Ids are physical.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baltoro.model.state import CacheViews


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after the first `length` tokens of a prefill span is also written to another slot, in every KDA layer.

    span    index among all spans of the step
    length  1 .. the span's own length; unless it is that, start + length is a multiple of `K3Model.state_chunk`
    slot    state slot that gets recurrent state and conv history; the span's own slot is written as ever
    """

    span: int
    length: int
    slot: int


@dataclass(frozen=True, slots=True)
class CacheMap:
    """Where the spans of this step live in the cache.

    slots       int64 [N], state slot of each span (0 is the sink)
    kv_rows     int64 [T], row of the flat KV cache that each token is written to (page * page_size + offset)
    page_table  int64 [N, P], pages of each span's request in order of position; unused entries are 0
    page_size   positions per page
    views       the cache tensors themselves
    snapshots   states of this step to keep besides; any number per span
    lengths     int64 [decodes], keys that each decode token (of a draft window: the last that counts) sees, itself
                included; None: as the spans say. A captured step has them here, since the spans are of the host
    """

    slots: Tensor
    kv_rows: Tensor
    page_table: Tensor
    page_size: int
    views: CacheViews
    snapshots: tuple[Snapshot, ...] = ()
    lengths: Tensor | None = None

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(page, offset in page), int64 each, of rows of the flat KV cache."""
        return rows // self.page_size, rows % self.page_size
