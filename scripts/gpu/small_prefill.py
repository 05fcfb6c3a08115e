"""Small launches of the kernels of prefill around KDA's chunk form and the experts, for compute-sanitizer:
`small_decode.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from baltoro.kernels.attnres import fast as attnres
from baltoro.kernels.attnres import fused
from baltoro.kernels.kda import enter as plain_enter
from baltoro.kernels.kda import fast_enter
from baltoro.kernels.kda.fused_reference import MixerWeights
from baltoro.kernels.mla import expanded, packed
from baltoro.kernels.norm import fast as norm
from baltoro.kernels.norm import reference as plain_norm
from baltoro.kernels.spans import Spans

Pair = tuple[str, Tensor, Tensor]
HEADS, SIZE = 3, 128


@torch.no_grad()
def packed_attention(device: str) -> Iterator[Pair]:
    for lengths, starts in (((130, 1, 65), (0, 200, 63)), ((3, 64), (0, 30))):
        spans = Spans.build(lengths, starts, device=device)
        num = sum(spans.ends)
        q = torch.randn(spans.num_tokens, HEADS, 192, device=device).bfloat16()
        both = torch.randn(num, HEADS, 256, device=device).bfloat16()
        shared = torch.randn(num, 64, device=device).bfloat16()
        got = packed.attend(q, both, shared, spans=spans, scale=192**-0.5, out_dtype=torch.bfloat16)
        wide = (x.double() for x in (q, both, shared))
        exact = expanded.by_reference(*wide, spans=spans, scale=192**-0.5, out_dtype=torch.float64)
        yield f"packed attention, {lengths} after {starts}", got, exact


@torch.no_grad()
def kda_ends(device: str) -> Iterator[Pair]:
    """What stands before the chunk form, and the gated norm behind it."""
    lengths, starts, borders = (1, 63, 130), (0, 64, 5), ((2, 59),)
    spans, num, width = Spans.build(lengths, starts, device=device), sum(lengths), 3 * HEADS * SIZE
    x = torch.randn(num, width + 8, device=device).bfloat16()[:, :width]
    raw, gate = (torch.randn(num, HEADS, SIZE, device=device).bfloat16() for _ in range(2))
    b, history = torch.randn(num, HEADS, device=device).bfloat16(), torch.randn(3, 3, width, device=device).bfloat16()
    weights = MixerWeights(
        torch.randn(width, 4, device=device) * 0.5, torch.randn(HEADS, device=device) * 0.3,
        torch.randn(HEADS, SIZE, device=device) - 2, torch.randn(SIZE, device=device), 1e-5, -5.0, SIZE**-0.5,
    )  # fmt: skip
    exact = replace(weights, **{n: getattr(weights, n).double() for n in ("conv", "A_log", "dt_bias", "norm")})
    got, after = fast_enter.enter(x, raw, b, weights, spans=spans, history=history, borders=borders)
    wide = (one.double() for one in (x, raw, b))
    wanted, kept = plain_enter.enter(*wide, exact, spans=spans, history=history.double(), borders=borders)
    for name, one, true in zip(got._fields, got, wanted, strict=True):
        yield f"before the chunk form, {name}", one, true
    yield "before the chunk form, histories", after, kept
    out = torch.randn(num, HEADS, SIZE, device=device)
    normed = norm.gated_rms_norm(out, gate, weights.norm, 1e-5, torch.bfloat16)
    true = plain_norm.gated_rms_norm(out.double(), gate.double(), exact.norm, 1e-5, torch.float64)
    yield "gated norm", normed, true


@torch.no_grad()
def depth_scan(device: str) -> Iterator[Pair]:
    bank = torch.randn(5, 70, 7168, device=device).bfloat16()
    prefix, update = (torch.randn(70, 7168, device=device).bfloat16() for _ in range(2))
    queries, gain = torch.randn(6, 7168, device=device) * 0.02, torch.rand(7168, device=device) + 0.5
    part, lse = attnres.scan_bank(bank, queries, 1e-5)
    wanted, _ = fused.scan_bank(bank.double(), queries.double(), 1e-5)
    yield "bank's part", part, wanted
    got = attnres.fold(part[3], lse[3], prefix, update, queries[3], gain, 1e-5, 1e-5)[1]
    true = fused.read(*(x.double() for x in (bank, prefix, update, queries[3], gain)), 1e-5, 1e-5)[1]
    yield "read behind it", got, true
