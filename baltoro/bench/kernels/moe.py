"""LatentMoE on one rank of the published shape: select, router + latent down, MXFP4 experts, beside torch's products.

Cases of the experts, 112 resident: 16 pairs of one token (batch 1), 512 rows over 112 experts, 16352 rows of prefill.
The experts are permuted (kernels/moe/permute.py), as an engine would hold them; the published order is beside them.
Times are of the whole expert product (both matrices, activation, grouping, weighted sum); the floor counts the weights
that are hit and the two products. `grouped_mm` is torch's, bf16 weights, gate+up and down alone, rows sorted already.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from baltoro.bench.kernels.humming import measure_humming
from baltoro.bench.kernels.timing import Ceilings, Figure, add_peer, graph_us
from baltoro.errors import InvariantError
from baltoro.kernels.linear import fast as fast_linear
from baltoro.kernels.linear import reference as linear
from baltoro.kernels.moe import fast_experts, fast_route, reference
from baltoro.kernels.moe.experts import grouped
from baltoro.kernels.moe.permute import permute_experts
from baltoro.kernels.moe.products import ExpertWeights, Packed
from baltoro.kernels.moe.reference import situ_glu

HIDDEN, LATENT, INNER, EXPERTS, ACTIVE, RESIDENT = 7168, 3584, 3072, 896, 16, 112
PACKED_BYTES = 0.53125  # a weight: half a byte, and a scale byte for 32
SITU = partial(situ_glu, beta=4.0, linear_beta=25.0)
# (name, tokens, pairs a token)
CASES = (("16 pairs", 1, 16), ("512 rows", 512, 1), ("16352 rows", 1022, 16))
CHECKED_TOKENS = 16  # of a case, against float64: the reference dequantises experts one by one


def measure(ceilings: Ceilings, *, with_peers: bool) -> Iterator[Figure]:
    """Figures of this module. Errors: InvariantError where a result is off."""
    yield from _select(ceilings)
    yield from _router(ceilings)
    yield from _experts(ceilings, with_peers=with_peers)


def _select(ceilings: Ceilings) -> Iterator[Figure]:
    options: dict[str, Any] = {"top_k": ACTIVE, "activation": "sigmoid", "is_renormalised": True, "scaling": 1.0}
    for tokens in (1, 256):
        logits, bias = torch.randn(tokens, EXPERTS, device="cuda"), torch.randn(EXPERTS, device="cuda") * 0.1
        error = _checked("select", fast_route.route(logits, bias, **options)[1],
                         reference.route(logits.double(), bias.double(), **options)[1], 1e-4)  # fmt: skip
        launch = partial(fast_route.route, logits, bias, **options)
        floor = ceilings.floor_us(tokens * (EXPERTS * 4 + ACTIVE * 12))
        yield Figure(f"top-{ACTIVE} of {EXPERTS}, {tokens} tokens", graph_us(launch), floor, error, {})


def _router(ceilings: Ceilings) -> Iterator[Figure]:
    weight = torch.randn(EXPERTS + LATENT, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.02
    for tokens in (1, 4, 8, 256):
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        logits, rest = fast_linear.router_linear(x, weight, EXPERTS)
        exact, exact_rest = linear.router_linear(x.double(), weight.double(), EXPERTS)
        _checked("router logits", logits, exact, 1e-5)
        error = _checked("latent down", rest, exact_rest, 5e-3)
        floor = ceilings.floor_us(2 * weight.numel(), 2 * tokens * weight.numel())
        peers = {"torch.mm, bf16 logits": graph_us(partial(torch.mm, x, weight.T))}
        launch = partial(fast_linear.router_linear, x, weight, EXPERTS)
        yield Figure(f"router + latent down, {tokens} tokens", graph_us(launch), floor, error, peers)


def _experts(ceilings: Ceilings, *, with_peers: bool) -> Iterator[Figure]:
    weights = resident_experts("cuda")
    permuted = permute_experts(weights)
    for name, tokens, active in CASES:
        z = torch.randn(tokens, LATENT, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, RESIDENT, device="cuda").topk(active).indices
        shares = torch.rand(tokens, active, device="cuda")
        floor = _floor(ceilings, ids)
        peers = _peers(weights, ids) if with_peers else {}
        for kind, experts, is_w4a8 in (
            ("W4A16", permuted, False), ("W4A8", permuted, True), ("W4A16, published order", weights, False)
        ):  # fmt: skip
            product = partial(fast_experts.expert_product, activation=SITU, fake_activations=is_w4a8)
            exact = grouped(z[:CHECKED_TOKENS].double(), ids[:CHECKED_TOKENS], shares[:CHECKED_TOKENS].double(),
                            weights, activation=SITU)  # fmt: skip
            out = product(z, ids, shares, experts)[:CHECKED_TOKENS]
            error = _checked(f"{name}, {kind}", out, exact, 0.12 if is_w4a8 else 1.2e-2)
            yield Figure(
                f"experts, {name}, {kind}", graph_us(partial(product, z, ids, shares, experts)), floor, error, peers
            )


def _peers(weights: ExpertWeights, ids: Tensor) -> dict[str, float]:
    peers: dict[str, float] = {}
    add_peer(peers, "grouped_mm, bf16", partial(_grouped_mm_us, ids))
    gate, up, down = weights.w1, weights.w3, weights.w2
    if find_spec("humming") and isinstance(gate, Packed) and isinstance(up, Packed) and isinstance(down, Packed):
        first = Packed(torch.cat([gate.packed, up.packed], 1), torch.cat([gate.scale, up.scale], 1))
        for kind, is_w4a8 in (("W4A16", False), ("W4A8", True)):
            measure = partial(measure_humming, first, down, ids, is_w4a8=is_w4a8)
            add_peer(peers, f"Humming {kind}, products alone", measure)
    return peers


def resident_experts(device: str, num: int = RESIDENT, width: int = LATENT, inner: int = INNER) -> ExpertWeights:
    """Random codes, scales over six binades, so that sums stay near 1."""

    def matrix(rows: int, columns: int) -> Packed:
        packed = torch.randint(0, 256, (num, rows, columns // 2), dtype=torch.uint8, device=device)
        scale = torch.randint(117, 123, (num, rows, columns // 32), dtype=torch.uint8, device=device)
        return Packed(packed, scale)

    return ExpertWeights(w1=matrix(inner, width), w3=matrix(inner, width), w2=matrix(width, inner))


def _floor(ceilings: Ceilings, ids: Tensor) -> float:
    size = 3 * LATENT * INNER
    num_hit = int((torch.bincount(ids.flatten()) > 0).sum())
    return ceilings.floor_us(num_hit * size * PACKED_BYTES, 2.0 * ids.numel() * size)


def _grouped_mm_us(ids: Tensor) -> float:
    """torch's grouped products, gate+up and down, of as many rows an expert, with weights in bf16."""
    both = torch.randn(RESIDENT, LATENT, 2 * INNER, device="cuda", dtype=torch.bfloat16) * 0.02
    down = torch.randn(RESIDENT, INNER, LATENT, device="cuda", dtype=torch.bfloat16) * 0.02
    rows = torch.randn(ids.numel(), LATENT, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(ids.numel(), INNER, device="cuda", dtype=torch.bfloat16)
    ends = torch.bincount(ids.flatten(), minlength=RESIDENT).cumsum(0).int()

    def launch() -> None:
        torch._grouped_mm(rows, both, offs=ends)
        torch._grouped_mm(hidden, down, offs=ends)

    return graph_us(launch)


def _checked(name: str, got: Tensor, exact: Tensor, bound: float) -> float:
    error = float((got.double() - exact).norm() / exact.norm())
    if not error < bound:  # NaN fails too
        raise InvariantError(f"{name}: off by {error:.2e} from the reference, {bound:.0e} is allowed; not timed")
    return error
