"""The product of packed experts under the interpreter, against the plain form in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from baltoro.kernels.moe import fast_experts, tile_experts, tile_order
from baltoro.kernels.moe.experts import gathered
from baltoro.kernels.moe.permute import permute_experts
from baltoro.kernels.moe.products import ExpertWeights, Packed
from baltoro.kernels.moe.reference import silu_glu, situ_glu
from baltoro.kernels.moe.tiles import tile_table
from baltoro.kernels.quant import mxfp4, mxfp8
from tests.kernels.tolerances import TOLERANCES

E, A, M, F = 5, 2, 96, 64
FORMS = {"pairs": fast_experts.of_pairs, "groups": fast_experts.of_groups}
ACTIVATIONS = {
    "situ": partial(situ_glu, beta=4.0, linear_beta=25.0),
    "situ_linear": partial(situ_glu, beta=2.0, linear_beta=None),
    "silu": silu_glu,
}


def experts(num: int = E, width: int = M, hidden: int = F) -> ExpertWeights:
    """Random bytes: every element code; scales over eight binades."""

    def matrix(rows: int, columns: int) -> Packed:
        packed = torch.randint(0, 256, (num, rows, columns // 2), dtype=torch.uint8)
        return Packed(packed, torch.randint(118, 126, (num, rows, columns // 32), dtype=torch.uint8))

    return ExpertWeights(w1=matrix(hidden, width), w3=matrix(hidden, width), w2=matrix(width, hidden))


def picks(tokens: int, num: int = E) -> tuple[Tensor, Tensor]:
    return torch.rand(tokens, num).topk(A).indices, torch.rand(tokens, A)


def gap(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("order", ["published", "permuted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", list(FORMS))
def test_product_is_that_of_the_reference(form: str, dtype: torch.dtype, order: str) -> None:
    z, (ids, weights), bytes_ = torch.randn(2, M).to(dtype), picks(2), experts()
    activation = ACTIVATIONS["situ"]
    known = fast_experts.known_activation(activation)
    assert known is not None
    out = FORMS[form](z, ids, weights, bytes_ if order == "published" else permute_experts(bytes_), known)
    expected = gathered(z.double(), ids, weights.double(), bytes_, activation=activation)
    assert out.dtype == dtype
    is_rounded_once = form == "pairs" and order == "published"  # others keep `hidden` in the dtype
    op = "expert_product" if is_rounded_once else "expert_product_grouped"
    assert gap(out, expected) < TOLERANCES[op][str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("name", ["situ_linear", "silu"])
def test_other_activations(form: str, name: str) -> None:
    z, (ids, weights), bytes_ = torch.randn(2, M), picks(2), experts()
    known = fast_experts.known_activation(ACTIVATIONS[name])
    assert known is not None
    out = FORMS[form](z, ids, weights, bytes_, known)
    expected = gathered(z.double(), ids, weights.double(), bytes_, activation=ACTIVATIONS[name])
    assert gap(out, expected) < TOLERANCES["expert_product"]["float32"]


def test_an_expert_may_have_many_tiles_and_others_no_row() -> None:
    z, bytes_ = torch.randn(40, M), experts(3)
    ids, weights = torch.tensor([[0, 2]]).repeat(40, 1), torch.rand(40, A)
    known = fast_experts.KnownActivation(fast_experts.SITU, 4.0, 25.0)
    expected = gathered(z.double(), ids, weights.double(), bytes_, activation=ACTIVATIONS["situ"])
    assert gap(fast_experts.of_groups(z, ids, weights, bytes_, known), expected) < 1e-6


@pytest.mark.parametrize("form", list(FORMS))
def test_w4a8_is_the_product_of_rounded_inputs(form: str) -> None:
    z, (ids, weights), bytes_ = torch.randn(2, M), picks(2), experts()
    activation = ACTIVATIONS["situ"]
    known = fast_experts.known_activation(activation)
    assert known is not None
    out = FORMS[form](z, ids, weights, bytes_, known, fake_activations=True)
    same = gathered(z, ids, weights, bytes_, activation=activation, fake_activations=True)
    exact = gathered(z.double(), ids, weights.double(), bytes_, activation=activation)
    assert gap(out, same.double()) < 5e-3  # a rounding of `hidden` may cross a grid line
    assert 1e-3 < gap(out, exact) < TOLERANCES["expert_product_w4a8"]["float32"]


def test_every_code_times_the_ends_of_the_scale_is_exact_and_what_is_beyond_shows() -> None:
    from baltoro.kernels.moe import expert_kernels

    codes = torch.arange(32, dtype=torch.uint8).remainder(16).repeat(9, 1)
    scale = torch.tensor([0, 1, 100, 127, 128, 200, 239, 240, 255], dtype=torch.uint8).unsqueeze(-1)
    packed, hidden = mxfp4.pack(codes), torch.eye(32)
    ids, weights, out = torch.zeros(32, 1, dtype=torch.int64), torch.ones(32, 1), torch.zeros(32, 9)
    expert_kernels.second_of_tokens[(32, 1)](hidden, ids, weights, packed, scale, out, 1, 32, 9, BLOCK_N=16, BLOCKS=1)
    expected = mxfp4.dequantise(packed, scale, torch.float32)
    torch.testing.assert_close(out.T, expected, rtol=0, atol=0, equal_nan=True)


def test_rows_longer_than_a_step_of_the_loop() -> None:
    bytes_, (ids, weights) = experts(2, width=608, hidden=32), (torch.tensor([[1]]), torch.ones(1, 1))
    z, activation = torch.randn(1, 608), ACTIVATIONS["silu"]
    expected = gathered(z.double(), ids, weights.double(), bytes_, activation=activation)
    for form in FORMS.values():
        assert gap(form(z, ids, weights, bytes_, fast_experts.KnownActivation(fast_experts.SILU)), expected) < 1e-6


@pytest.mark.parametrize("wide", [2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_inputs_are_put_in_order_and_rounded_as_mxfp8(dtype: torch.dtype, wide: int) -> None:
    x = torch.randn(5, 160) * 10.0 ** torch.randint(-6, 4, (5, 1))
    x[0, 32:64], x[1, 3], x[2, :32] = 0.0, -448.0, 3e-41
    x, order = x.to(dtype), torch.tensor([9, 0, 4])
    arranged = partial(tile_order.arranged, order=order, wide=wide, width=160, num_active=2)
    column = torch.arange(256)
    inside, block = column % 16, column % 128 // 32
    place = column // 128 * 128 + column % 32 // 16 * 64 + inside // wide * 4 * wide + block * wide + inside % wide
    expected = torch.zeros(3, 256, dtype=dtype)
    expected[:, place[:160]] = x[order // 2]
    assert torch.equal(arranged(x, is_rounded=False), expected)
    expected[:, place[:160]] = mxfp8.fake(x)[order // 2]
    assert torch.equal(arranged(x, is_rounded=True), expected)


def test_slabs_are_the_same_rows_with_their_runs_swapped() -> None:
    x, order = torch.randn(5, 160), torch.tensor([9, 0, -1, 4, 1, 2, 3, 5, 7])
    options = {"wide": 2, "width": 160, "num_active": 2, "is_rounded": False}
    plain = tile_order.arranged(x, order.clamp(min=0), **options).unflatten(1, (4, 8, 8))
    slabs = tile_order.arranged(x, order, is_slab=True, **options).unflatten(2, (8, 8))
    assert slabs.shape == (4, 9, 8, 8)
    for row in (0, 1, 3, 4, 5, 6, 7, 8):
        assert torch.equal(slabs[:, row, torch.arange(8) ^ (row % 8)], plain[row])


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize(("tokens", "active", "num", "rows"), [(7, 2, 5, 8), (300, 2, 3, 160), (1, 1, 9, 8)])
def test_pairs_are_grouped_as_in_torch(tokens: int, active: int, num: int, rows: int, align: int) -> None:
    ids = torch.rand(tokens, num).topk(active).indices
    order, table = tile_order.grouped(ids, num, rows, align)
    expected_order, expected = tile_table(ids, num, rows, align)
    assert torch.equal(order, expected_order) and torch.equal(table[0], expected[0])
    assert torch.equal(table[:, table[0] < num], expected[:, expected[0] < num])


@pytest.mark.parametrize(
    "cut",
    [
        (16, 0, 64, 2, 1),
        (16, 8, 128, 8, 1, 128),
        (16, 0, 64, 2, 1, 0, 1, 4, True),
    ],
    ids=["warp", "group", "spread"],
)
def test_every_cut_is_the_same_product(cut: tuple[int, ...]) -> None:
    z, bytes_, ids = torch.randn(25, M), experts(3), torch.tensor([[0, 2]]).repeat(25, 1)
    weights, tile = torch.rand(25, A), tile_experts.Tile(*cut)
    expected = gathered(z.double(), ids, weights.double(), bytes_, activation=ACTIVATIONS["situ"])
    plan = tile_experts.Plan(tile, tile)
    out = tile_experts.run(z, ids, weights, permute_experts(bytes_), (1, 4.0, 25.0), plan, is_pairs=False)
    assert gap(out, expected) < 1e-6


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("plan", [tile_experts.PAIRS, *(plan for _, plan in tile_experts.GROUPS[:2])])
def test_rows_of_a_wider_product_are_read_where_they_lie(plan: tile_experts.Plan, is_rounded: bool) -> None:
    wide, bytes_, ids = torch.randn(4, M + 48), permute_experts(experts(3)), torch.tensor([[0, 2]]).repeat(4, 1)
    shares, z = torch.rand(4, A), wide[:, 48:]
    is_pairs = plan is tile_experts.PAIRS
    run = partial(tile_experts.run, is_pairs=is_pairs, fake_activations=is_rounded)
    out = run(z, ids, shares, bytes_, (1, 4.0, 25.0), plan)
    assert torch.equal(out, run(z.contiguous(), ids, shares, bytes_, (1, 4.0, 25.0), plan))
    across = z.t().contiguous().t()
    assert torch.equal(out, run(across, ids, shares, bytes_, (1, 4.0, 25.0), plan))


@pytest.mark.parametrize(
    ("split", "active", "width", "is_spread"), [(1, 3, 96, False), (3, 1, 352, False), (1, 2, 352, True)]
)
def test_pieces_of_a_pair_are_added_up_by_the_last(split: int, active: int, width: int, is_spread: bool) -> None:
    z, bytes_ = torch.randn(2, width), experts(4, width=width, hidden=352)
    ids, weights = torch.rand(2, 4).topk(active).indices, torch.rand(2, active)
    tile = tile_experts.Tile(8, 0, 128, 2, 1, fetch=12, spread=is_spread)
    plan = tile_experts.Plan(tile, replace(tile, split=split))
    expected = gathered(z.double(), ids, weights.double(), bytes_, activation=ACTIVATIONS["situ"])
    out = tile_experts.run(z, ids, weights, permute_experts(bytes_), (1, 4.0, 25.0), plan, is_pairs=True)
    assert gap(out, expected) < 1e-6


def test_what_is_asked_for_early_is_a_power_of_two_and_no_more_than_a_piece_has() -> None:
    for units in range(1, 40):
        for fetch, split in ((0, 1), (1, 2), (3, 1), (4, 1), (4, 3), (12, 2), (64, 1)):
            found = tile_experts.fetched(tile_experts.Tile(8, 0, 64, 1, 1, split=split, fetch=fetch), units)
            least = min((i + 1) * units // split - i * units // split for i in range(split))
            assert found.bit_count() <= 1 and found <= min(fetch, least) < 2 * max(found, 1)


@pytest.mark.parametrize("form", list(FORMS))
def test_the_tiny_models_sizes_are_padded(form: str) -> None:
    z, bytes_, known = torch.randn(1, 128), experts(6, width=128, hidden=96), fast_experts.KnownActivation(1, 4.0, 25.0)
    ids, weights = torch.rand(1, 6).topk(4).indices, torch.rand(1, 4)
    expected = gathered(z.double(), ids, weights.double(), bytes_, activation=ACTIVATIONS["situ"])
    assert gap(FORMS[form](z, ids, weights, permute_experts(bytes_), known), expected) < 1e-6


def test_scales_of_bf16_products_up_to_their_bound_and_what_is_beyond_shows() -> None:
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).repeat(5, 1)
    one = Packed(mxfp4.pack(codes)[None], torch.tensor([60, 127, 160, 161, 255], dtype=torch.uint8)[None, :, None])
    none = Packed(torch.zeros(1, 32, 16, dtype=torch.uint8), torch.full((1, 32, 1), 127, dtype=torch.uint8))
    permuted = permute_experts(ExpertWeights(w1=none, w3=none, w2=one))
    ids, tile = torch.zeros(32, 1, dtype=torch.int64), tile_experts.EXACT.second
    hidden, counters = torch.nn.functional.pad(torch.eye(32), (0, 96)), torch.zeros(32, 4, dtype=torch.int32)
    parts = tile_experts.second_of_pairs(hidden, ids, torch.ones(32, 1), counters, permuted, tile, torch.float32)
    expected = mxfp4.dequantise(one.packed[0], one.scale[0], torch.float32).T
    assert torch.equal(parts[:, :3], expected[:, :3]) and not torch.isfinite(parts[1:8, 3:]).any()


def test_the_entry_picks_a_form_by_the_number_of_pairs_and_leaves_the_rest_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bytes_, activation = experts(), ACTIVATIONS["situ"]
    monkeypatch.setattr(fast_experts, "MAX_PAIRS", 2 * A)
    for tokens in (2, 3):
        z, (ids, weights) = torch.randn(tokens, M), picks(tokens)
        out = fast_experts.expert_product(z, ids, weights, bytes_, activation=activation)
        assert gap(out, gathered(z.double(), ids, weights.double(), bytes_, activation=activation)) < 1e-6
    z, (ids, weights) = torch.randn(2, M, dtype=torch.float64), picks(2)
    out = fast_experts.expert_product(z, ids, weights.double(), bytes_, activation=activation)
    assert gap(out, gathered(z, ids, weights.double(), bytes_, activation=activation)) < 1e-14


def test_no_tokens_and_free_rows_of_memory_do_no_harm() -> None:
    known = fast_experts.KnownActivation(fast_experts.SILU)
    for form in FORMS.values():
        assert form(torch.empty(0, M), *picks(0), experts(), known).shape == (0, M)
