"""Rows of `kda.py` in the form of the other modules: ours, and the peers of the same operation beside it.

Results are held against the reference by tests/kernels/test_kda_on_gpu.py, not here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baltoro.bench.kernels import kda
from baltoro.bench.kernels.timing import Ceilings, Figure

OURS = "baltoro"


def measure(found: Ceilings, *, with_peers: bool) -> Iterator[Figure]:
    """A figure an operation, and one for each number of accepted tokens of a fold."""
    torch.manual_seed(0)
    for name, make in kda._benches():
        yield from beside(make(name, found.bytes_per_s), with_peers=with_peers)


def beside(rows: list[kda.Figure], *, with_peers: bool) -> Iterator[Figure]:
    """Rows of one operation: ours, each with the peers' times."""
    peers = {f"{row.implementation}, {row.note}": 1e6 * row.seconds for row in rows if row.implementation != OURS}
    ours = [row for row in rows if row.implementation == OURS]
    for row in ours:
        name = f"{row.operation}, {row.note}" if len(ours) > 1 else row.operation
        yield Figure(name, 1e6 * row.seconds, 1e6 * row.floor_seconds, None, peers if with_peers else {})
