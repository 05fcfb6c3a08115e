"""Forms of the depth mix and of top-16 on one GPU, for one token and some more: right first, then fast.

    PYTHONPATH=/tmp/site2:. python3 -m scripts.gpu.lab_small --seconds 60
    TRITON_INTERPRET=1 python -m scripts.gpu.lab_small --dry        (tiny sizes, no times; for a machine without a GPU)

What to set: `attnres.fast.CLUSTER` (None: two launches), CLUSTER_TOKENS, FEW_TOKENS; `moe.fast_route.choose_wide`
("_groups" of 0: Triton's form). "What top-16 adds" is a setting's time less that of "product", in the same table.
Method: `lab_mla.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baltoro.kernels.attnres import fast as attnres
from baltoro.kernels.attnres.fast import Cluster
from baltoro.kernels.attnres.reference import mix
from baltoro.kernels.linear import fast as linear
from baltoro.kernels.moe import fast_route
from baltoro.kernels.moe.reference import route
from scripts.gpu import lab_mla
from scripts.gpu.lab_mla_cases import EPS, PICKS, SMALL, Case, Problem, depth_mix, device_of, gap, router

Results = tuple[Tensor, Tensor]


def one_source(is_dry: bool) -> Problem:
    """The mix of a single source, so no more than a launch and what every form pays beside the sources."""
    sources, query = torch.randn(1, 1, 300 if is_dry else 7168, device=device_of(is_dry)).bfloat16(), None
    query = torch.randn(sources.shape[-1], device=sources.device) * 0.02

    def launch(setting: dict[str, Any], turn: int) -> Tensor:
        with mock.patch.multiple(attnres, **setting), torch.no_grad():
            return attnres.mix(sources, query, EPS)

    exact = mix(sources.double(), query.double(), EPS)
    return Problem(launch, lambda out: gap(out, exact), 4.0 * sources.numel(), turns=1 if is_dry else SMALL)


def odd_logits(device: str) -> tuple[Tensor, Tensor]:
    """Rows with many equal keys, and NaN and infinities: [5, 896], [896]."""
    logits = torch.randint(-2, 3, (5, 896), device=device).float()
    logits[0], logits[1, 700:] = 0.0, 9.0
    logits[2] = torch.randn(896, device=device)
    bias = torch.zeros(896, device=device)
    bias[77], bias[300], bias[895] = float("nan"), float("-inf"), float("inf")
    return logits, bias


def select(tokens: int, is_dry: bool) -> Problem:
    """Picks must be those of the reference, on odd rows too."""
    device, tokens = device_of(is_dry), min(tokens, 3) if is_dry else tokens
    logits, bias = torch.randn(tokens, 896, device=device), torch.randn(896, device=device) * 0.1
    exact = route(logits, bias, **PICKS)
    odd = odd_logits(device)
    last: dict[str, Any] = {}

    def launch(setting: dict[str, Any], turn: int) -> Results:
        last.update(setting=setting)
        with mock.patch.multiple(fast_route, **setting):
            return fast_route.route(logits, bias, **PICKS)

    def error(results: Results) -> float:
        with mock.patch.multiple(fast_route, **last["setting"]):
            ids, weights = fast_route.route(*odd, **PICKS)
        counts = torch.zeros(896, dtype=torch.int32, device=device)
        with mock.patch.multiple(fast_route, **last["setting"]):
            options = {"activation": "sigmoid", "is_renormalised": True, "scaling": 1.0}
            fast_route.select(*odd, counts, top_k=16, **options)
        known, shares = route(*odd, **PICKS)
        is_right = torch.equal(results[0], exact[0]) and torch.equal(ids, known)
        is_right &= torch.equal(counts, torch.bincount(ids.flatten(), minlength=896).int())
        return gap(results[1], exact[1].double()) + gap(weights, shares.double()) if is_right else float("nan")

    return Problem(launch, error, tokens * (896 * 4 + 16 * 12), turns=1 if is_dry or tokens > 64 else SMALL)


def router_and_select(is_dry: bool) -> Problem:
    """What selecting adds to the product in front of it; a setting of None is the product alone."""
    product, experts = router(1, is_dry), 24 if is_dry else 896
    bias = torch.randn(experts, device=device_of(is_dry)) * 0.1
    tiles = linear.choose_tiles(1)

    def launch(setting: dict[str, Any] | None, turn: int) -> tuple[Results, Results | None]:
        found = product.launch(tiles, turn)
        if setting is None:
            return found, None
        with mock.patch.multiple(fast_route, **setting):
            return found, fast_route.route(found[0], bias, **PICKS)

    def error(results: tuple[Results, Results | None]) -> float:
        logits, picks = results[0][0], results[1]
        if picks is not None and not torch.equal(picks[0], route(logits, bias, **PICKS)[0]):
            return float("nan")
        return product.error(results[0])

    return Problem(launch, error, product.num_bytes, product.flops, product.turns)


@cache
def mixes() -> list[dict[str, Any]]:
    """Two launches and clusters, then a program a token."""
    shapes = ((8, 4), (8, 2), (8, 8), (16, 2), (4, 8), (16, 4), (4, 4), (2, 16), (2, 8))
    clusters = [{"CLUSTER": Cluster(*shape), "CLUSTER_TOKENS": 8192} for shape in shapes]
    return [clusters[0], {"CLUSTER": None, "FEW_TOKENS": 0}, {"CLUSTER": None, "FEW_TOKENS": 1024}, *clusters[1:]]


def always(value: int) -> Callable[..., int]:
    """A function that gives it."""
    return lambda *_: value


FORMS: list[dict[str, Any]] = [
    *({"choose_wide": always(wide)} for wide in (4, 8, 16, 2)), {"_groups": always(0)},
]  # fmt: skip
CASES = [
    Case("depth mix, 1 token", partial(depth_mix, 1), mixes(), 1e-2),
    Case("top-16, 1 token", partial(select, 1), FORMS, 1e-5),
    Case("router + top-16, 1 token", router_and_select, [None, *FORMS, None], 5e-3),
    Case("depth mix of one source", one_source, mixes()[:4], 1e-2),
    Case("depth mix, 8 tokens", partial(depth_mix, 8), mixes()[:6], 1e-2),
    Case("depth mix, 32 tokens", partial(depth_mix, 32), mixes()[:5], 1e-2),
    Case("depth mix, 64 tokens", partial(depth_mix, 64), mixes()[:4], 1e-2),
    Case("depth mix, 128 tokens", partial(depth_mix, 128), mixes()[:4], 1e-2),
    Case("depth mix, 512 tokens", partial(depth_mix, 512), mixes()[:4], 1e-2),
    Case("top-16, 256 tokens", partial(select, 256), FORMS, 1e-5),
    Case("top-16, 8192 tokens", partial(select, 8192), [*FORMS[:3], FORMS[-1]], 1e-5),
]

if __name__ == "__main__":
    lab_mla.main(settings="scripts.gpu.lab_small")
