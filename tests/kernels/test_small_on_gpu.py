"""Norm, gated activations, and what stands before and behind latent attention, on a CUDA device at K3's widths too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baltoro.kernels.attnres import fast as attnres
from baltoro.kernels.attnres import fused
from baltoro.kernels.attnres.fast import Cluster
from baltoro.kernels.attnres.reference import mix
from baltoro.kernels.moe import fast_route
from baltoro.kernels.moe.reference import route
from tests.kernels.small import SHAPES, check_enter, check_glu, check_leave, check_norm

pytestmark = pytest.mark.gpu
K3 = {"one token": (1, 12, 128, 128, 512, 64), "64 tokens": (64, 12, 128, 128, 512, 64)}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 7168), (64, 3584), (5, 96)])
def test_norm_and_activations(rows: int, width: int, dtype: torch.dtype) -> None:
    check_norm(rows, width, dtype, "cuda")
    check_glu(rows, width, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("name", [*SHAPES, *K3])
def test_what_enters_and_leaves_latent_attention(name: str, dtype: torch.dtype) -> None:
    shape = (SHAPES | K3)[name]
    check_enter(shape, dtype, "cuda")
    check_leave(shape, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("shape", [(8, 4), (8, 2), (4, 8), (16, 2)])
@pytest.mark.parametrize(("num", "tokens", "width"), [(8, 1, 7168), (1, 3, 4100), (15, 8, 8192)])
def test_a_cluster_reads_the_depth(
    shape: tuple[int, int], num: int, tokens: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attnres, "CLUSTER", Cluster(*shape))
    bank = torch.randn(num, tokens, width, device="cuda").to(dtype)
    prefix, update = (torch.randn(tokens, width, device="cuda").to(dtype) for _ in range(2))
    query, gain = torch.randn(width, device="cuda") * 0.05, (torch.rand(width, device="cuda") + 0.5).to(dtype)
    bound = 1e-5 if dtype == torch.float32 else 6e-3
    for rows in ((prefix, update), (prefix, None), (None, update)):
        total, out = attnres.read(bank, *rows, query, gain, 1e-5, 1e-5)
        wide = [None if row is None else row.double() for row in rows]
        exact = fused.read(bank.double(), *wide, query.double(), gain.double(), 1e-5, 1e-5)[1]
        assert (out.double() - exact).norm() / exact.norm() < bound
        assert torch.equal(total, sum(row for row in rows if row is not None))
    out, exact = attnres.mix(bank, query, 1e-5), mix(bank.double(), query.double(), 1e-5)
    assert (out.double() - exact).norm() / exact.norm() < bound


@pytest.mark.parametrize("wide", [2, 4, 8, 16])
def test_top_k_by_hand(wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_route, "choose_wide", lambda _: wide)
    logits, bias = torch.randint(-3, 4, (70, 896), device="cuda").float(), torch.zeros(896, device="cuda")
    logits[0], logits[1, 700:], logits[2] = 0.0, 9.0, torch.randn(896, device="cuda")
    bias[77], bias[300], bias[895] = float("nan"), float("-inf"), float("inf")
    options = {"activation": "sigmoid", "is_renormalised": True, "scaling": 2.5}
    counts = torch.zeros(896, dtype=torch.int32, device="cuda")
    ids, weights = fast_route.select(logits, bias, counts, top_k=16, **options)
    expected_ids, expected = route(logits, bias, top_k=16, **options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-8)
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=896).int())
