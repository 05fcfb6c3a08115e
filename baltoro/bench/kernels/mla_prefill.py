"""Times of expanded latent attention in prefill, K3's widths on a rank of eight: fresh prompts, and with a past.

In: a CUDA device. Out: Figures. Floor: both products over the pairs of query and key that see each other. Peer: the
framework's attention on padded groups, which with a past is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from baltoro.bench.kernels.timing import Ceilings, Figure, add_peer, graph_us
from baltoro.errors import InvariantError
from baltoro.kernels.mla import expanded, packed
from baltoro.kernels.spans import Spans

HEADS, OWN, SHARED, VALUE, SCALE = 12, 128, 64, 128, 192**-0.5
BOUND = 6e-3
# (lengths of the spans, keys before each)
CASES = (((4096,), 0), ((1024,) * 4, 0), ((1024,), 15360), ((32,) * 64, 480), ((16384,), 0))


def measure(found: Ceilings, *, with_peers: bool) -> Iterator[Figure]:
    """One figure a case. Errors: InvariantError for a wrong result."""
    for lengths, start in CASES:
        spans = Spans.build(lengths, (start,) * len(lengths), device="cuda")
        inputs = problem(spans)
        options = {"spans": spans, "scale": SCALE, "out_dtype": torch.bfloat16}
        with torch.no_grad():
            error = worst_gap(packed.attend(*inputs, **options), inputs, spans)
            if not error < BOUND:
                raise InvariantError(f"attention of {len(lengths)} x {lengths[0]} after {start} is off by {error:.1e}")
            time_us = graph_us(partial(packed.attend, *inputs, **options))
            peers: dict[str, float] = {}
            if with_peers and len(lengths) < 8:
                beside = partial(expanded.by_padding, *inputs, **options)
                add_peer(peers, "the framework's", partial(graph_us, beside, samples=5, inner=2))
        pairs = sum(length * start + length * (length + 1) // 2 for length in lengths)
        floor = found.floor_us(sum(2 * x.numel() for x in inputs), 2.0 * pairs * HEADS * (OWN + SHARED + VALUE))
        name = f"mla prefill, {HEADS} heads, {len(lengths)} x {lengths[0]} tokens after {start}"
        yield Figure(name, time_us, floor, error, peers)


def problem(spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
    """q, expanded, shared."""
    num, options = sum(spans.ends), {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(spans.num_tokens, HEADS, OWN + SHARED, **options)  # type: ignore[call-overload]
    both = torch.randn(num, HEADS, OWN + VALUE, **options)  # type: ignore[call-overload]
    return q, both, torch.randn(num, SHARED, **options)  # type: ignore[call-overload]


def worst_gap(out: Tensor, inputs: tuple[Tensor, Tensor, Tensor], spans: Spans) -> float:
    """Largest relative distance from FP64 of the queries that are looked at."""
    q, both, shared = inputs
    gaps, key = [], 0
    for n, end in enumerate(spans.ends):
        if n in (0, len(spans) - 1):
            for i in {0, 1, spans.lengths[n] - 2, spans.lengths[n] - 1}:
                row = spans.offsets[n] + i
                seen = slice(key, key + spans.starts[n] + i + 1)
                one = Spans.build((1,), (spans.starts[n] + i,), device="cuda")
                wide = (q[row : row + 1].double(), both[seen].double(), shared[seen].double())
                exact = expanded.by_reference(*wide, spans=one, scale=SCALE, out_dtype=torch.float64)
                gaps.append(float((out[row].double() - exact[0]).norm() / exact.norm()))
        key += end
    return max(gaps, key=lambda gap: (gap != gap, gap))
