"""What the Gluon forms of the depth mix and of routing compute, in torch: their layouts and waits need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baltoro.kernels.attnres import fused
from baltoro.kernels.attnres.cluster_text import lane_sums, opening, warp_sums
from baltoro.kernels.moe.reference import route
from tests.kernels.gluon_by_torch import kernels

ROOT = Path(__file__).parents[2] / "baltoro/kernels"
EPS, NORM_EPS = 1e-3, 1e-2


def mixed(num: int, width: int, pending: str, *, has_norm: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum and mix of the kernel, and as they should be; 2 programs of 2 warps, 8 channels a thread at most."""
    bank, query = torch.randn(num, 2, width) * (1 + torch.arange(num).view(-1, 1, 1)), torch.randn(width)
    prefix, update = (torch.randn(2, width) if pending in (kind, "both") else None for kind in ("prefix", "update"))
    gain = torch.rand(width) + 0.5 if has_norm else None
    total, out = torch.full((2, width), float("nan")), torch.full((2, width), float("nan"))
    text = (opening(2, 2), lane_sums(2, 2), warp_sums(2, 2))
    wide = (1 << (width - 1).bit_length()) // 128
    kernels(ROOT / "attnres/cluster_kernels.py")["cluster_mix_kernel"](
        (2,), bank, prefix, update, query, gain, total, out, bank.stride(0), bank.stride(1), EPS, NORM_EPS,
        num, width, 2, 2, wide, None, *text, prefix is not None, update is not None, has_norm, True,
    )  # fmt: skip
    exact = [None if x is None else x.double() for x in (bank, prefix, update, query)]
    if not has_norm:
        rows = [bank.double(), *(sum(x for x in exact[1:3] if x is not None).unsqueeze(0) for _ in (1,) if pending)]
        from baltoro.kernels.attnres.reference import mix

        return total, out, total, mix(torch.cat(rows), exact[3], EPS)
    return total, out, *fused.read(*exact, gain.double(), EPS, NORM_EPS)


@pytest.mark.parametrize(
    ("num", "width", "pending"), [(8, 250, "both"), (1, 128, "prefix"), (3, 1000, "update"), (15, 200, "both")]
)
@torch.no_grad()
def test_a_cluster_adds_mixes_and_norms(num: int, width: int, pending: str) -> None:
    total, out, exact_total, exact = mixed(num, width, pending, has_norm=True)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    if pending == "both":
        torch.testing.assert_close(total.double(), exact_total)


@torch.no_grad()
def test_a_cluster_mixes_a_bank_alone() -> None:
    _, out, _, exact = mixed(5, 250, "", has_norm=False)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


def picks(logits: Tensor, bias: Tensor, top_k: int, groups: int, wide: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = logits.shape
    ids, weights = torch.full((tokens, top_k), -1), torch.full((tokens, top_k), float("nan"))
    counts = torch.zeros(experts, dtype=torch.int32)
    launch = kernels(ROOT / "moe/gluon_route.py")["select_kernel"]
    layouts = (None, None)
    launch(
        (tokens,),
        logits,
        bias,
        ids,
        weights,
        counts,
        experts,
        2.5,
        top_k,
        16,
        groups,
        wide,
        *layouts,
        True,
        True,
        True,
    )
    return ids, weights, counts


@pytest.mark.parametrize(("experts", "groups", "wide"), [(896, 8, 4), (896, 4, 8), (40, 2, 2), (128, 2, 2)])
@pytest.mark.parametrize("kind", ["random", "few values", "odd"])
def test_picks_are_those_of_the_reference(experts: int, groups: int, wide: int, kind: str) -> None:
    logits, bias = torch.randn(3, experts), torch.randn(experts) * 0.3
    if kind != "random":
        logits, bias = torch.randint(-1, 2, (3, experts)).float() * 0.5, torch.zeros(experts)
    if kind == "odd":
        bias[2], bias[5], bias[7], logits[1, 9] = float("nan"), float("-inf"), float("inf"), -0.0
    options = {"top_k": 16, "activation": "sigmoid", "is_renormalised": True, "scaling": 2.5}
    ids, weights, counts = picks(logits, bias, 16, groups, wide)
    expected_ids, expected = route(logits, bias, **options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-8)
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=experts).int())
