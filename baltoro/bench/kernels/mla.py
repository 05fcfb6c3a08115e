"""Times of latent attention over paged rows in decode, K3's widths: heads of a rank and of the whole, one and many.

In: a CUDA device. Out: Figures. Key rows lie as in an arena, one layer of several, and are too many for the cache.
Floor: the key rows read once, and the operations of both products.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baltoro.bench.kernels.timing import Ceilings, Figure, graph_us
from baltoro.errors import InvariantError
from baltoro.kernels.mla import reference, split_decode

LATENT, SHARED, PAGE, SCALE = 512, 64, 64, 192**-0.5
LAYERS = 3
"""Whose rows lie side by side in a page; the middle one is read."""
BOUND = 6e-3
# (requests, keys of each, heads, query tokens)
CASES = ((1, 131072, 12, 1), (1, 131072, 96, 1), (32, 8192, 12, 1), (32, 8192, 12, 8), (1, 1048576, 12, 1))


def measure(found: Ceilings, *, with_peers: bool) -> Iterator[Figure]:
    """One figure a case. No peer is small enough to travel. Errors: InvariantError for a wrong result."""
    for requests, keys, heads, window in CASES:
        q, kv, table, lengths = problem(requests, keys, heads, window)
        out = split_decode.attend_absorbed(q, kv, table, lengths, latent=LATENT, scale=SCALE)[0]
        error = worst_gap(out, q, kv, table, lengths)
        if not error < BOUND:
            raise InvariantError(f"mla decode {requests} x {keys} x {heads} heads is off by {error:.1e}")
        num_bytes = requests * keys * (LATENT + SHARED) * 2
        flops = 2.0 * requests * keys * heads * window * (2 * LATENT + SHARED)

        def launch(q: Tensor = q, kv: Tensor = kv, table: Tensor = table, lengths: Tensor = lengths) -> object:
            return split_decode.attend_absorbed(q, kv, table, lengths, latent=LATENT, scale=SCALE)

        name = f"mla decode, {heads} heads, {requests} x {keys} keys, {window} tokens"
        yield Figure(name, graph_us(launch), found.floor_us(num_bytes, flops), error, {})


def problem(requests: int, keys: int, heads: int, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, kv, page_table, lengths: pages in random order, the last tile of each request half full and NaN behind."""
    pages = -(-keys // PAGE)
    count = requests * pages + 1
    arena = torch.randn(count, PAGE, LAYERS, LATENT + SHARED, device="cuda", dtype=torch.bfloat16)
    table = (torch.randperm(count - 1, device="cuda") + 1).view(requests, pages)
    lengths = torch.full((requests,), keys - PAGE // 2, device="cuda")
    arena[table[:, -1], PAGE // 2 :] = float("nan")
    shape = (requests, heads) if window == 1 else (requests, window, heads)
    q = torch.randn(*shape, LATENT + SHARED, device="cuda", dtype=torch.bfloat16)
    return q, arena[:, :, 1], table, lengths


def worst_gap(out: Tensor, q: Tensor, kv: Tensor, table: Tensor, lengths: Tensor) -> float:
    """Largest relative distance of a request's output from FP64, of the first and the last request."""
    gaps = []
    for n in {0, len(q) - 1}:
        one = slice(n, n + 1)
        rows, own = kv[table[n]].double(), torch.arange(table.shape[1], device=table.device).unsqueeze(0)
        exact = reference.attend_absorbed(q[one].double(), rows, own, lengths[one], latent=LATENT, scale=SCALE)[0]
        gaps.append(float((out[one].double() - exact).norm() / exact.norm()))
    return max(gaps, key=lambda gap: (gap != gap, gap))
