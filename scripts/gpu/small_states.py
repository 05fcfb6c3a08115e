"""Small launches of the kernels that write states or read packed experts, for compute-sanitizer: `small_decode.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from baltoro.kernels.kda import fused, prefill
from baltoro.kernels.kda import fused_reference as reference
from baltoro.kernels.kda.fused_reference import MixerWeights, Window
from baltoro.kernels.kda.reference import l2_norm, recurrent
from baltoro.kernels.moe import experts, fast_experts
from baltoro.kernels.moe.permute import permute_experts
from baltoro.kernels.moe.products import ExpertWeights, Packed
from baltoro.kernels.moe.reference import situ_glu
from baltoro.kernels.quant import mxfp4
from baltoro.kernels.spans import Spans

Pair = tuple[str, Tensor, Tensor]
HEADS, TOKENS, SLOTS = 3, 4, (6, 0, 3, 8)  # slot 0 is the sink


def kda(device: str, size: int = 128) -> Iterator[Pair]:
    """Decode, verify and fold of a few requests, one of them in the sink."""
    width, num = 3 * HEADS * size, len(SLOTS)
    x, a, b, gate = (
        torch.randn(num, TOKENS, *rest, device=device).bfloat16()
        for rest in ((width,), (HEADS, size), (HEADS,), (HEADS, size))
    )
    weights = MixerWeights(
        torch.randn(width, 4, device=device) * 0.5, torch.randn(HEADS, device=device) * 0.3,
        torch.randn(HEADS, size, device=device) - 2, torch.randn(size, device=device), 1e-5, -5.0, size**-0.5,
    )  # fmt: skip
    exact = replace(weights, **{n: getattr(weights, n).double() for n in ("conv", "A_log", "dt_bias", "norm")})
    history = torch.randn(9, 3, width, device=device).bfloat16()
    state = torch.randn(9, HEADS, size, size, device=device)
    slots, live = torch.tensor(SLOTS, device=device), [0, 2, 3]
    window = Window.empty(
        num, TOKENS, heads=HEADS, keys=size, values=size, dtype=torch.bfloat16, device=device, layers=1
    )
    first = history.clone(), state.clone()
    at_once = fused.verify(x, a, b, gate, weights, history, state, slots, window.layer(0))
    past, matrix = history.double(), state.double()
    for t in range(TOKENS):
        got = fused.decode(x[:, t], a[:, t], b[:, t], gate[:, t], weights, history, state, slots)
        wide = (one[:, t].double() for one in (x, a, b, gate))
        wanted = reference.decode(*wide, exact, past, matrix, slots)
        yield f"decode, token {t}", got[live], wanted[live]
        yield f"verify, token {t}", at_once[live, t], wanted[live]
    accepted = torch.full((num,), TOKENS, dtype=torch.int32, device=device)
    fused.fold(window, [first[0]], [first[1]], slots, accepted)
    yield "folded states", first[1][1:], matrix[1:]


def kda_prefill(device: str, size: int = 128) -> Iterator[Pair]:
    lengths, starts, borders = (1, 63, 130), (0, 64, 5), ((2, 59),)
    num = sum(lengths)
    q, k = (l2_norm(torch.randn(num, HEADS, size, device=device).double()) for _ in range(2))
    v = torch.randn(num, HEADS, size, device=device).bfloat16()
    g, beta = -5 * torch.rand(num, HEADS, size, device=device).double(), torch.rand(num, HEADS, device=device).double()
    state = torch.randn(len(lengths), HEADS, size, size, device=device)
    spans = Spans.build(lengths, starts, device=device)
    wanted = recurrent(q, k, v.double(), g, beta, spans=spans, state=state.double(), scale=size**-0.5, borders=borders)
    layout = lengths, starts, borders
    for cut in (None, 1):
        got = prefill.run(
            q.float(), k.float(), v, g.float(), beta.float(), state, layout, scale=size**-0.5, is_bounded=True,
            segment_chunks=cut,
        )  # fmt: skip
        for name, one, exact in zip(("outputs", "states"), got, wanted, strict=True):
            yield f"prefill, {name}, segments of {cut or 'all'} chunks", one, exact


def routed_experts(device: str) -> Iterator[Pair]:
    count, width, inner = 8, 256, 192
    shapes = {"w1": (count, inner, width), "w3": (count, inner, width), "w2": (count, width, inner)}
    packed = {name: Packed(*mxfp4.quantise(torch.randn(shape, device=device) * 0.1)) for name, shape in shapes.items()}
    weights, activation = ExpertWeights(**packed), partial(situ_glu, beta=4.0, linear_beta=25.0)
    tiles = permute_experts(weights)
    for tokens, top in ((1, 4), (6, 4), (16, 4), (40, 4), (90, 4), (160, 4), (700, 4)):  # every plan, tiles in part
        z = torch.randn(tokens, width, device=device).bfloat16()
        ids = torch.rand(tokens, count, device=device).topk(top).indices
        shares = torch.rand(tokens, top, device=device)
        wanted = experts.grouped(z.double(), ids, shares.double(), weights, activation=activation)
        yield (
            f"experts, {tokens} x {top}",
            fast_experts.expert_product(z, ids, shares, tiles, activation=activation),
            wanted,
        )
