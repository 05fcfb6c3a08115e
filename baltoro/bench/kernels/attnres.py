"""Times of the depth mix, K3's widths: with add and norm for decode, bank pass and fold for prefill.

In: a CUDA device. Out: Figures. Floor: every source, update and result once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baltoro.bench.kernels.timing import Ceilings, Figure, graph_us
from baltoro.errors import InvariantError
from baltoro.kernels.attnres import fast, fused

WIDTH, BANK, QUERIES, EPS = 7168, 8, 24, 1e-5
BOUND = 1.2e-2
TOKENS = (1, 32, 8192)


def measure(found: Ceilings, *, with_peers: bool) -> Iterator[Figure]:
    """A figure per number of tokens, then the two phases. Errors: InvariantError for a wrong result."""
    row = WIDTH * 2
    for tokens in TOKENS:
        bank, prefix, update, queries, gain = problem(tokens)
        rest = (prefix, update, queries[0], gain, EPS, EPS)
        some = slice(0, 64)
        total, out = fast.read(bank, *rest)
        error = _gap(out[some], _exact(bank[:, some], prefix[some], update[some], queries[0], gain))

        def launch(bank: Tensor = bank, rest: tuple[Tensor, Tensor, Tensor, Tensor, float, float] = rest) -> object:
            return fast.read(bank, *rest)

        peers = {}
        if with_peers:

            def plain(sources: Tensor = torch.cat([bank, total.unsqueeze(0)]), query: Tensor = queries[0]) -> object:
                return fast.mix(sources, query, EPS)

            with torch.no_grad():
                peers["mix alone"] = graph_us(plain)
        floor = found.floor_us((BANK + 4) * row * tokens)
        yield Figure(f"attnres add + mix + norm, {tokens} tokens, 9 sources", graph_us(launch), floor, error, peers)
    yield from _phases(found)


def _phases(found: Ceilings) -> Iterator[Figure]:
    tokens, row = TOKENS[-1], WIDTH * 2
    bank, prefix, update, queries, gain = problem(tokens)
    part, lse = fast.scan_bank(bank, queries, EPS)
    some = slice(0, 64)
    exact = fused.scan_bank(bank[:, some].double(), queries.double(), EPS)
    floor = found.floor_us((BANK + QUERIES) * row * tokens)
    error = _gap(part[:, some], exact[0])
    time_us = graph_us(lambda: fast.scan_bank(bank, queries, EPS))
    yield Figure(f"attnres bank pass, {tokens} tokens, {QUERIES} queries", time_us, floor, error, {})
    out = fast.fold(part[0], lse[0], prefix, update, queries[0], gain, EPS, EPS)[1]
    whole = _exact(bank[:, some], prefix[some], update[some], queries[0], gain)
    time_us = graph_us(lambda: fast.fold(part[0], lse[0], prefix, update, queries[0], gain, EPS, EPS))
    yield Figure(
        f"attnres fold, {tokens} tokens", time_us, found.floor_us(5 * row * tokens), _gap(out[some], whole), {}
    )


def problem(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """bank [8, T, D], prefix, update [T, D] in bf16; queries [24, D] FP32; gain [D]."""
    bank = torch.randn(BANK, tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    prefix, update = (torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    queries = torch.randn(QUERIES, WIDTH, device="cuda") * 0.02
    return bank, prefix, update, queries, (torch.rand(WIDTH, device="cuda") + 0.5).bfloat16()


def _exact(bank: Tensor, prefix: Tensor, update: Tensor, query: Tensor, gain: Tensor) -> Tensor:
    """The normed mix in FP64."""
    wide = (bank.double(), prefix.double(), update.double(), query.double(), gain.double())
    return fused.read(*wide, EPS, EPS)[1]


def _gap(got: Tensor, exact: Tensor) -> float:
    error = float((got.double() - exact).norm() / exact.norm())
    if not error < BOUND:
        raise InvariantError(f"the depth mix is off by {error:.1e}")
    return error
