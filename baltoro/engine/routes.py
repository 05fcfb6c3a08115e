"""Routes in the arena: what the routers took for a token lies behind its KV, in the same row of its page.

So they go wherever the KV goes without anybody's help: a cached prefix has those of the forward that computed it, forks
copy them, what is carried or comes back from the host or a file brings them along, and a token that is computed again
has those of the newest forward. Layers write them (captured steps too), the runner reads the rows that a request has
not been told yet, behind the layers.

In: a row's layout, spans. Out: views, rows to read, bytes as `model/routes.py` describes them.
Not here: what a request does with them (`request.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from baltoro.cache.shape import Part
from baltoro.engine.batch import Span
from baltoro.errors import ConfigError
from baltoro.kernels.copies import to_device, to_host
from baltoro.model.config import K3Config
from baltoro.model.routes import bytes_per_token, shape_of

ALIGNMENT = 64
"""Bytes: a row of KV keeps the alignment that it has without routes."""
MAX_EXPERTS = 1 << 15


def row_with_routes(row: Part | None, model: K3Config) -> Part:
    """The KV row with room for routes behind it, flat. Errors: ConfigError for a model without KV or experts."""
    wanted = bytes_per_token(model)
    if row is None or not row.num_bytes or not wanted or model.num_experts > MAX_EXPERTS:
        raise ConfigError(
            f"keeps_routed_experts: routes lie behind the KV, and are of at most {MAX_EXPERTS} experts; this model has "
            f"{len(model.mla_layers)} layers with KV and {model.num_experts} experts"
        )
    size = row.dtype.itemsize
    return Part((prod(row.shape) + -(-wanted // ALIGNMENT) * ALIGNMENT // size,), row.dtype)


def split_rows(rows: Tensor, model: K3Config) -> tuple[Tensor, Tensor]:
    """Rows [P, page_size, values] of such a layout -> KV [P, page_size, layers, R+Dr], routes int16 [P * page_size, Y,
    A]; both are views."""
    kv_shape, shape = (len(model.mla_layers), model.kv_row_width), shape_of(model)
    kv, behind = rows[..., : prod(kv_shape)], rows[..., prod(kv_shape) :]
    routes = behind.view(torch.int16)[..., : prod(shape)].view(-1, *shape)
    return torch.unflatten(kv, -1, kv_shape), routes


class Reading:
    """Routes on their way to the host, of the spans whose requests want them."""

    def __init__(self, routes: Tensor, spans: Sequence[Span], page_size: int) -> None:
        """Queue the copy of all rows that `spans` have to tell."""
        self._counts = [span.end - span.routes_from for span in spans if span.routes_from is not None]
        rows = [_rows(span, span.routes_from, page_size) for span in spans if span.routes_from is not None]
        index = to_device(torch.from_numpy(np.concatenate(rows)), routes.device)
        self._found = to_host(routes.index_select(0, index))

    def parts(self) -> list[bytes]:
        """One for each span that has rows to tell, in order; the device must have done its part."""
        values = self._found.numpy()
        ends = np.cumsum(self._counts)[:-1]
        return [part.tobytes() for part in np.split(values, ends)]


def _rows(span: Span, first: int, page_size: int) -> np.ndarray:
    """int64: rows of the flat KV cache of positions first .. end-1."""
    positions = np.arange(first, span.end)
    return span.pages[positions // page_size] * page_size + positions % page_size
