"""One small launch of each decode kernel at K3's widths, against the references: what compute-sanitizer runs over.

    compute-sanitizer --tool memcheck python3 -m scripts.gpu.small_decode [PART ...]     (racecheck ...)

Parts: attention, depth_mix, router, picks, forms, copies_and_sampling, kda, kda_prefill, routed_experts,
packed_attention, kda_ends, depth_scan; unnamed: all.
Shapes have a tail of every kind: a page in part, a split without keys, a window, rows past a block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baltoro.kernels.attnres import fast as attnres
from baltoro.kernels.attnres import fused
from baltoro.kernels.kda import fused as fused_kda
from baltoro.kernels.linear import fast as linear
from baltoro.kernels.linear import reference as plain_linear
from baltoro.kernels.mla import reference, split_decode
from baltoro.kernels.moe import fast_route
from baltoro.kernels.moe.reference import route
from baltoro.kernels.paged import fast as paged
from baltoro.kernels.sample import fast as sampling
from baltoro.kernels.sample.reference import sample
from scripts.gpu.small_prefill import depth_scan, kda_ends, packed_attention
from scripts.gpu.small_states import kda, kda_prefill, routed_experts

Pair = tuple[str, Tensor, Tensor]


def gap(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def attention(device: str) -> Iterator[Pair]:
    arena = torch.randn(12, 64, 2, 576, device=device).bfloat16()
    kv, lengths = arena[:, :, 1], torch.tensor([8, 65, 200], device=device)
    table = (torch.randperm(11, device=device) + 1)[:9].view(3, 3)
    table = torch.cat([table, torch.zeros_like(table[:, :1])], 1)  # pages that nobody uses are 0
    for window, heads in ((1, 12), (8, 12)):
        q = torch.randn(3, window, heads, 576, device=device).bfloat16()
        options: dict[str, Any] = {"latent": 512, "scale": 192**-0.5}
        exact = reference.attend_absorbed(q.double(), kv.double(), table, lengths, **options)[0]
        for splits in (None, 1, 5):
            out = split_decode.attend_absorbed(q, kv, table, lengths, splits=splits, **options)[0]
            yield f"attention, window {window}, splits {splits}", out, exact


def depth_mix(device: str) -> Iterator[Pair]:
    for tokens in (2, 70):
        bank = torch.randn(8, tokens, 7168, device=device).bfloat16()
        prefix, update = (torch.randn(tokens, 7168, device=device).bfloat16() for _ in range(2))
        query, gain = torch.randn(7168, device=device) * 0.02, torch.rand(7168, device=device) + 0.5
        exact = fused.read(*(x.double() for x in (bank, prefix, update, query, gain)), 1e-5, 1e-5)
        yield f"depth mix, {tokens}", attnres.read(bank, prefix, update, query, gain, 1e-5, 1e-5)[1], exact[1]


def router(device: str) -> Iterator[Pair]:
    weight = torch.randn(900, 1024, device=device).bfloat16()
    for tokens in (1, 3, 12, 40, 130):
        x = torch.randn(tokens, 1024, device=device).bfloat16()
        logits, rest = linear.router_linear(x, weight, 300)
        exact = plain_linear.router_linear(x.double(), weight.double(), 300)
        yield f"logits, {tokens}", logits, exact[0]
        yield f"rest, {tokens}", rest, exact[1]


def picks(device: str) -> Iterator[Pair]:
    options: dict[str, Any] = {"top_k": 16, "activation": "sigmoid", "is_renormalised": True, "scaling": 1.0}
    logits, bias = torch.randn(3, 896, device=device), torch.randn(896, device=device) * 0.1
    ids, weights = fast_route.route(logits, bias, **options)
    exact_ids, exact = route(logits.double(), bias.double(), **options)
    yield "picks", ids.double(), exact_ids.double()
    yield "their weights", weights, exact


def forms(device: str) -> Iterator[Pair]:
    """What a card that is no Hopper has: depth mix in two launches, picks and fold in Triton; many tokens' picks."""
    with mock.patch.object(attnres, "CLUSTER", None), mock.patch.object(fast_route, "_groups", lambda *_: 0):
        yield from depth_mix(device)
        yield from picks(device)
    with mock.patch.object(fused_kda, "_is_direct", lambda *_: False):
        yield from kda(device)
    for wide in (8, 16):
        with mock.patch.object(fast_route, "choose_wide", lambda _, wide=wide: wide):
            yield from picks(device)


def copies_and_sampling(device: str) -> Iterator[Pair]:
    kv, rows = torch.zeros(5, 64, 2, 576, device=device).bfloat16(), torch.randn(3, 576, device=device).bfloat16()
    places = tuple(torch.tensor(some, device=device) for some in ([1, 4, 2], [0, 63, 5]))
    paged.scatter_rows(kv[:, :, 1], (places[0], places[1]), rows[:, :512], rows[:, 512:])
    yield "scattered rows", kv[:, :, 1][places], rows.double()
    logits = torch.randn(2, 5000, device=device)
    cuts = [torch.tensor(some, device=device) for some in ([0, 40], [0.9, 1.0], [0.0, 0.02])]
    uniform = torch.tensor([0.3, 0.7], device=device, dtype=torch.float64)
    ids = sampling.sample(logits, *cuts, uniform)
    yield "sampled ids", ids.double(), sample(logits, *cuts, uniform).double()


def main(wanted: list[str], device: str = "cuda") -> None:
    torch.manual_seed(0)
    parts = (
        attention, depth_mix, router, picks, forms, copies_and_sampling, kda, kda_prefill, routed_experts,
        packed_attention, kda_ends, depth_scan,
    )  # fmt: skip
    for part in (part for part in parts if part.__name__ in (wanted or [part.__name__])):
        for name, got, exact in part(device):
            error = gap(got, exact)
            print(f"{'ok   ' if error < 1e-2 else 'WRONG'} {name}: {error:.1e}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
