"""The Triton forms of the mixture of experts on a CUDA device, against float64; the logic is tested in interp/."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from baltoro.bench.kernels.moe import resident_experts
from baltoro.kernels.linear import fast, reference
from baltoro.kernels.moe import fast_experts, fast_route, tile_experts, tile_order
from baltoro.kernels.moe.experts import grouped
from baltoro.kernels.moe.permute import permute_experts
from baltoro.kernels.moe.reference import route, silu_glu, situ_glu
from baltoro.kernels.moe.tile_experts import Plan, Tile
from baltoro.kernels.moe.tiles import tile_table
from baltoro.kernels.quant import mxfp8
from tests.kernels.tolerances import TOLERANCES

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def gap(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_route(tokens: int) -> None:
    logits, bias = torch.randn(tokens, 896, device="cuda"), torch.randn(896, device="cuda") * 0.1
    logits[0, ::3] = 0.5  # ties
    options = {"top_k": 16, "activation": "sigmoid", "is_renormalised": True, "scaling": 2.5}
    ids, weights = fast_route.route(logits, bias, **options)
    expected_ids, expected = route(logits.double(), bias.double(), **options)
    assert gap(weights, expected) < TOLERANCES["route"]["float32"]
    # keys that differ by less than fp32 resolves may swap
    assert (ids == expected_ids).float().mean() > 0.999


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 9, 100, 300])
def test_products(rows: int, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    x = torch.randn(rows, 7168, device="cuda").to(dtype)
    weight = (torch.randn(896 + 3585, 7168, device="cuda") * 0.02).to(dtype)
    logits, rest = fast.router_linear(x, weight, 896)
    expected, expected_rest = reference.router_linear(x.double(), weight.double(), 896)
    assert gap(logits, expected) < 1e-5 and gap(rest, expected_rest) < max(1e-5, TOLERANCES["router_linear"][name])
    assert gap(fast.linear(x, weight), torch.cat((expected, expected_rest), 1)) < max(1e-5, TOLERANCES["linear"][name])
    gain = torch.rand(7168, device="cuda").to(dtype)
    expected = reference.norm_linear(x.double(), gain.double(), weight.double(), 1e-5)
    assert gap(fast.norm_linear(x, gain, weight, 1e-5), expected) < max(1e-5, TOLERANCES["norm_linear"][name])


@DTYPES
@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize(("tokens", "active"), [(1, 16), (4, 16), (50, 3), (100, 4), (100, 8), (400, 8)])
def test_experts(tokens: int, active: int, is_permuted: bool, dtype: torch.dtype) -> None:
    weights = resident_experts("cuda", num=24, width=608, inner=352)
    experts = permute_experts(weights) if is_permuted else weights
    z = torch.randn(tokens, 608, device="cuda").to(dtype)
    ids = torch.rand(tokens, 24, device="cuda").topk(active).indices
    shares, activation = torch.rand(tokens, active, device="cuda"), partial(situ_glu, beta=4.0, linear_beta=25.0)
    expected = grouped(z.double(), ids, shares.double(), weights, activation=activation)
    out = fast_experts.expert_product(z, ids, shares, experts, activation=activation)
    bound = TOLERANCES["expert_product_grouped"]["bfloat16"] if dtype == torch.bfloat16 else 1e-5
    assert gap(out, expected) < bound
    again = fast_experts.expert_product(z, ids, shares, experts, activation=activation)
    assert torch.equal(out, again)


SITU = partial(situ_glu, beta=4.0, linear_beta=25.0)
TURNED = replace(tile_experts.PAIRS.second, split=1, spread=True, signal=3)
MANY, FEW = tile_experts.MANY, tile_experts.FEW
IN_TRITON = (replace(MANY, slabs=False), replace(FEW, few=False))
OTHERS = (*IN_TRITON, replace(FEW, block=64, warps=1), TURNED)


@pytest.mark.parametrize(
    "plan",
    [
        tile_experts.PAIRS,
        *(plan for _, plan in tile_experts.GROUPS),
        *(Plan(tile, tile) for tile in OTHERS),
    ],
)
def test_every_plan_of_permuted_experts_for_few_and_many_rows(plan: Plan) -> None:
    weights = resident_experts("cuda", num=6, width=608, inner=352)
    permuted, activation = permute_experts(weights), partial(situ_glu, beta=4.0, linear_beta=25.0)
    for tokens in (1, 9, 300, 2100):
        z, shares = torch.randn(tokens, 608, device="cuda").bfloat16(), torch.rand(tokens, 2, device="cuda")
        ids = torch.rand(tokens, 6, device="cuda").topk(2).indices
        expected = grouped(z.double(), ids, shares.double(), weights, activation=activation)
        for is_pairs in {plan.rows == 8, False}:
            out = tile_experts.run(z, ids, shares, permuted, (1, 4.0, 25.0), plan, is_pairs=is_pairs)
            assert gap(out, expected) < TOLERANCES["expert_product_grouped"]["bfloat16"]
        out = tile_experts.run(z, ids, shares, permuted, (1, 4.0, 25.0), plan, is_pairs=False, fake_activations=True)
        assert 1e-3 < gap(out, expected) < TOLERANCES["expert_product_w4a8"]["bfloat16"]


RING, WIDE = tile_experts.RING, tile_experts.WIDE
RAGGED = (0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 64, 65)


@pytest.mark.parametrize("changes", [{}, {"block": 64, "warps": 1}, {"block": 256, "warps": 4}])
def test_ragged_rows_of_few(changes: dict[str, int]) -> None:
    ragged(replace(FEW, **changes))  # type: ignore[arg-type]


def test_ragged_rows_of_the_small_ring() -> None:
    ragged(tile_experts.SMALL)


@pytest.mark.parametrize("changes", [
    {}, {"short": 0}, {"ahead": False}, {"stages": 3}, {"block": 128, "stages": 6}, {"block": 64, "warps": 4},
    {"warps": 4, "stages": 2, "registers": 168}, {"warps": 4, "stages": 2, "registers": 168, "ahead": False},
])  # fmt: skip
def test_ragged_rows_of_the_ring(changes: dict[str, int]) -> None:
    ragged(replace(RING, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [
    {}, {"short": 0}, {"ahead": True}, {"warps": 4, "stages": 2, "registers": 0},
])  # fmt: skip
def test_ragged_rows_of_the_wide_ring(changes: dict[str, int]) -> None:
    ragged(replace(WIDE, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 60, 300, 700])
def test_rows_of_a_wider_product_are_read_where_they_lie(tokens: int, is_rounded: bool) -> None:
    weights = resident_experts("cuda", num=24, width=640, inner=352)
    permuted, activation = permute_experts(weights), partial(situ_glu, beta=4.0, linear_beta=25.0)
    z, shares = torch.randn(tokens, 752, device="cuda").bfloat16()[:, 112:], torch.rand(tokens, 3, device="cuda")
    ids = torch.rand(tokens, 24, device="cuda").topk(3).indices
    run = partial(fast_experts.expert_product, activation=activation, fake_activations=is_rounded)
    assert torch.equal(run(z, ids, shares, permuted), run(z.contiguous(), ids, shares, permuted))


# a tile of slabs has as many rows as its expert, up to 160
COUNTS = (0, 1, 7, 8, 9, 15, 16, 17, 0, 64, 65, 80, 81, 127, 128, 129, 144, 145, 152, 153, 160, 161, 192, 193, 255, 256,
          257, 300, 320, 321, 513, 0)  # fmt: skip


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_ragged_rows_of_slabs(kind: int) -> None:
    ragged(MANY, COUNTS, kind)


def ragged(tile: Tile, numbers: tuple[int, ...] = RAGGED, kind: int = 1) -> None:
    """Experts with these numbers of rows."""
    weights = resident_experts("cuda", num=len(numbers), width=608, inner=352)
    permuted = permute_experts(weights)
    activation = (silu_glu, SITU, partial(situ_glu, beta=4.0, linear_beta=None))[kind]
    ids = torch.repeat_interleave(torch.arange(len(numbers)), torch.tensor(numbers))
    ids = ids[torch.randperm(len(ids))].cuda()[:, None]
    z, shares = torch.randn(len(ids), 608, device="cuda").bfloat16(), torch.rand(len(ids), 1, device="cuda") + 0.5
    expected = grouped(z.double(), ids, shares.double(), weights, activation=activation)
    run = partial(tile_experts.run, z, ids, shares, permuted, (kind, 4.0, 25.0), Plan(tile, tile), is_pairs=False)
    out = run()
    errors = (out.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < 2 * TOLERANCES["expert_product_grouped"]["bfloat16"]
    assert all(torch.equal(run(), out) for _ in range(20))
    if kind == 1:
        rounded = run(fake_activations=True)
        assert 1e-3 < gap(rounded, expected) < TOLERANCES["expert_product_w4a8"]["bfloat16"]
        assert torch.equal(run(fake_activations=True), rounded)


@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 4])
def test_pairs_are_added_up_by_the_last_program_always_in_the_same_order(tokens: int, split: int) -> None:
    weights = resident_experts("cuda", num=24, width=1408, inner=1152)
    tiled, activation = permute_experts(weights), partial(situ_glu, beta=4.0, linear_beta=25.0)
    z, shares = torch.randn(tokens, 1408, device="cuda").bfloat16(), torch.rand(tokens, 16, device="cuda")
    ids = torch.rand(tokens, 24, device="cuda").topk(16).indices
    plan = Plan(tile_experts.PAIRS.first, replace(tile_experts.PAIRS.second, split=split))
    run = partial(tile_experts.run, z, ids, shares, tiled, (1, 4.0, 25.0), plan, is_pairs=True)
    expected = grouped(z.double(), ids, shares.double(), weights, activation=activation)
    out = run()
    assert gap(out, expected) < TOLERANCES["expert_product_grouped"]["bfloat16"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(50):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, out) and torch.equal(run(), out)


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("tokens", [1, 700])
def test_pairs_are_grouped_and_rounded_as_in_torch(tokens: int, align: int) -> None:
    ids = torch.rand(tokens, 112, device="cuda").topk(16).indices
    order, table = tile_order.grouped(ids, 112, 16, align)
    expected_order, expected = tile_table(ids, 112, 16, align)
    assert torch.equal(order, expected_order) and torch.equal(table[0], expected[0])
    assert torch.equal(table[:, table[0] < 112], expected[:, expected[0] < 112])
    x = torch.randn(tokens, 608, device="cuda").bfloat16() * 30
    rounded = tile_order.arranged(x, None, 8, 608, num_active=1, is_rounded=True)
    assert torch.equal(rounded, tile_order.arranged(mxfp8.fake(x), None, 8, 608, num_active=1, is_rounded=False))
