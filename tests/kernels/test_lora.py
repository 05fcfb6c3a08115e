"""The low-rank terms against dense products of scale * B A, row by row; gradients; rows of steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.errors import ShapeError
from baltoro.kernels.lora.experts import ExpertDelta, ExpertFactors
from baltoro.kernels.lora.reference import add_absorbed_query, add_absorbed_value, add_delta
from baltoro.kernels.lora.rows import AdapterRows
from baltoro.kernels.moe import experts as moe
from baltoro.kernels.moe.products import ExpertWeights
from baltoro.kernels.moe.reference import silu_glu

F64 = torch.float64


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def rows_of(slots: tuple[int, ...], lengths: tuple[int, ...]) -> AdapterRows:
    rows = AdapterRows.build(slots, lengths)
    assert rows is not None
    return rows


def test_rows_are_grouped_by_slot() -> None:
    rows = rows_of((2, 0, 1, 2), (1, 2, 3, 1))
    assert rows.slots.tolist() == [2, 0, 0, 1, 1, 1, 2]
    assert rows.present == (1, 2)
    assert [None if g is None else g.tolist() for g in rows.groups] == [[3, 4, 5], [0, 6]]
    assert rows_of((3, 3), (2, 1)).groups == (None,)
    assert AdapterRows.build((0, 0), (1, 5)) is None and AdapterRows.build((), ()) is None
    for slots in ((1,), (1, -1)):
        with pytest.raises(ShapeError, match="adapter slots"):
            AdapterRows.build(slots, (1, 1))


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_each_row_gets_its_own_term_and_others_keep_their_bits(dtype: torch.dtype) -> None:
    x, out = draw(7, 5, dtype=dtype), draw(7, 6, seed=1, dtype=dtype)
    a, b = draw(3, 4, 5, seed=2, dtype=dtype), draw(3, 6, 4, seed=3, dtype=dtype)
    acc = F64 if dtype == F64 else torch.float32
    scale, rows = torch.tensor([0.5, 2.0, 3.0], dtype=acc), rows_of((2, 0, 1, 2, 3), (1, 2, 2, 1, 1))
    got = add_delta(out, x, a, b, scale, rows, active={1, 2})
    for t, slot in enumerate(rows.slots.tolist()):
        if slot not in (1, 2):
            assert torch.equal(got[t], out[t])
            continue
        term = scale[slot - 1] * (b[slot - 1].to(acc) @ (a[slot - 1].to(acc) @ x[t].to(acc)))
        torch.testing.assert_close(got[t], (out[t].to(acc) + term).to(dtype))
    assert add_delta(out, x, a, b, scale, rows, active=()) is out


def test_the_absorbed_form_is_the_expanded_one() -> None:
    """q (W + s B A) and (W + s B A) latent, of the key and the value part of kv_b."""
    num, heads, key, value, latent, rank = 5, 3, 4, 6, 7, 2
    w, a, b = draw(heads, key + value, latent), draw(2, rank, latent, seed=1), draw(2, heads, key + value, rank, seed=2)
    scale, rows = torch.tensor([2.0, 0.5], dtype=F64), rows_of((1, 0, 2), (2, 1, 2))
    q, out = draw(num, heads, key, seed=3), draw(num, heads, latent, seed=4)
    factors = torch.split(b, [key, value], dim=2)
    base_q, base_v = torch.einsum("nhk,hkr->nhr", q, w[:, :key]), torch.einsum("nhr,hvr->nhv", out, w[:, key:])
    got_q = add_absorbed_query(base_q, q, a, factors[0], scale, rows, active={1, 2})
    got_v = add_absorbed_value(base_v, out, a, factors[1], scale, rows, active={1, 2})
    for n, slot in enumerate(rows.slots.tolist()):
        whole = w if not slot else w + scale[slot - 1] * (b[slot - 1] @ a[slot - 1])
        torch.testing.assert_close(got_q[n], torch.einsum("hk,hkr->hr", q[n], whole[:, :key]))
        torch.testing.assert_close(got_v[n], torch.einsum("hr,hvr->hv", out[n], whole[:, key:]))


def expert_delta(slots: tuple[int, ...], lengths: tuple[int, ...]) -> ExpertDelta:
    """Two slots, 5 experts, width 4, hidden 6, rank 3."""
    scale = torch.tensor([2.0, 0.25], dtype=F64)
    w1, w3 = (ExpertFactors(draw(2, 1, 3, 4, seed=s), draw(2, 5, 6, 3, seed=s + 1), scale, {1, 2}) for s in (1, 3))
    w2 = ExpertFactors(draw(2, 5, 3, 6, seed=5), draw(2, 1, 4, 3, seed=6), scale, {1, 2})
    return ExpertDelta(w1, w3, w2, rows_of(slots, lengths))


@pytest.mark.parametrize("form", [moe.gathered, moe.grouped, moe.everywhere])
@pytest.mark.parametrize("slots", [(1, 0, 2), (2, 2, 2)])
def test_experts_with_shared_outer_factors_equal_their_merge(form: object, slots: tuple[int, ...]) -> None:
    base = ExpertWeights(draw(5, 6, 4, seed=7), draw(5, 6, 4, seed=8), draw(5, 4, 6, seed=9))
    z, lengths = draw(10, 4, seed=10), (4, 1, 5)
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(n))[:2] for n in range(10)])
    weights, delta = draw(10, 2, seed=11).abs(), expert_delta(slots, lengths)
    got = form(z, ids, weights, base, activation=silu_glu, delta=delta)  # type: ignore[operator]
    for t, slot in enumerate(delta.rows.slots.tolist()):

        def merged(w: Tensor, f: ExpertFactors, slot: int = slot) -> Tensor:
            return w + f.scale[slot - 1] * (f.b[slot - 1] @ f.a[slot - 1]) if slot else w

        pairs = zip((base.w1, base.w3, base.w2), (delta.w1, delta.w3, delta.w2), strict=True)
        whole = ExpertWeights(*(merged(w, f) for w, f in pairs if isinstance(w, Tensor)))
        wanted = moe.gathered(z[t : t + 1], ids[t : t + 1], weights[t : t + 1], whole, activation=silu_glu)
        torch.testing.assert_close(got[t : t + 1], wanted)


@pytest.mark.parametrize("slot", [1, 2])
def test_one_token_alone_has_its_adapter(slot: int) -> None:
    base = ExpertWeights(draw(5, 6, 4, seed=7), draw(5, 6, 4, seed=8), draw(5, 4, 6, seed=9))
    z, ids, weights, delta = (
        draw(1, 4, seed=10),
        torch.tensor([[3, 1]]),
        draw(1, 2, seed=11),
        expert_delta((slot,), (1,)),
    )
    expected = moe.gathered(z, ids, weights, base, activation=silu_glu, delta=delta)
    torch.testing.assert_close(moe.single(z, ids, weights, base, activation=silu_glu, delta=delta), expected)


@pytest.mark.parametrize("form", [moe.gathered, moe.grouped])
def test_gradients_reach_every_factor(form: object) -> None:
    base = ExpertWeights(draw(5, 6, 4, seed=7), draw(5, 6, 4, seed=8), draw(5, 4, 6, seed=9))
    delta = expert_delta((1, 2), (3, 2))
    leaves = [t.requires_grad_() for f in (delta.w1, delta.w3, delta.w2) for t in (f.a, f.b)]
    z, ids = draw(5, 4, seed=10).requires_grad_(), torch.tensor([[0, 3], [1, 2], [4, 0], [2, 3], [1, 0]])
    weights = draw(5, 2, seed=11).abs().requires_grad_()

    def run(*_: Tensor) -> Tensor:
        return form(z, ids, weights, base, activation=silu_glu, delta=delta)  # type: ignore[operator]

    assert torch.autograd.gradcheck(run, (z, weights, *leaves))


@pytest.mark.parametrize("slots", [(1, 0, 2, 1), (0, 0, 0, 2), (1, 1, 1, 1)])
def test_the_fixed_form_is_the_one_by_rows(slots: tuple[int, ...]) -> None:
    """Dense sites, both absorbed products and routed experts; slot 2 has no factors at the dense site: scale 0."""
    lengths = (2, 1, 3, 1)
    rows, each = rows_of(slots, lengths), torch.tensor(slots).repeat_interleave(torch.tensor(lengths))
    fixed = AdapterRows.fixed(each, 2)
    x, out = draw(7, 5), draw(7, 6, seed=1)
    a, b, scale = draw(2, 4, 5, seed=2), draw(2, 6, 4, seed=3), torch.tensor([0.5, 0.0], dtype=F64)
    torch.testing.assert_close(
        add_delta(out, x, a, b, scale, fixed, active={1}), add_delta(out, x, a, b, scale, rows, active={1})
    )
    scale = torch.tensor([0.5, 2.0], dtype=F64)
    a, b = draw(2, 2, 7, seed=4), draw(2, 3, 4, 2, seed=5)
    q, latent = draw(7, 3, 4, seed=6), draw(7, 3, 7, seed=7)
    for add, base, given in ((add_absorbed_query, latent, q), (add_absorbed_value, q, latent)):
        found, wanted = (add(base, given, a, b, scale, one, active={1, 2}) for one in (fixed, rows))
        torch.testing.assert_close(found, wanted)
    weights = ExpertWeights(draw(5, 6, 4, seed=11), draw(5, 6, 4, seed=12), draw(5, 4, 6, seed=13))
    delta = expert_delta(slots, lengths)
    z, ids, shares = draw(7, 4, seed=14), torch.arange(21).view(7, 3) * 2 % 5, draw(7, 3, seed=15)
    results = []
    for one in (rows, fixed):
        terms = ExpertDelta(delta.w1, delta.w3, delta.w2, one)
        results.append(moe.expert_product(z, ids, shares, weights, activation=silu_glu, delta=terms))
    torch.testing.assert_close(*results)
    without = moe.expert_product(z, ids, shares, weights, activation=silu_glu)
    for t, slot in enumerate(each.tolist()):
        assert torch.allclose(results[1][t], without[t]) == (slot == 0)


def test_rows_without_an_adapter_keep_their_bits_in_fixed_form() -> None:
    x, out = draw(4, 5, dtype=torch.bfloat16), draw(4, 6, seed=1, dtype=torch.bfloat16)
    a, b = draw(2, 4, 5, seed=2, dtype=torch.bfloat16), draw(2, 6, 4, seed=3, dtype=torch.bfloat16)
    rows = AdapterRows.fixed(torch.tensor([0, 2, 0, 1]), 2)
    got = add_delta(out, x, a, b, torch.ones(2), rows, active={1, 2})
    assert torch.equal(got[::2], out[::2]) and not torch.equal(got[1::2], out[1::2])


def test_only_small_experts_go_through_all_tokens() -> None:
    small = ExpertWeights(*(torch.empty(32, *shape, device="meta") for shape in ((96, 128), (96, 128), (128, 96))))
    assert moe.can_be_fixed(small, 8192) and not moe.can_be_fixed(small, 1 << 16)
    large = ExpertWeights(*(torch.empty(896, 64, 8192, device="meta") for _ in range(3)))
    assert not moe.can_be_fixed(large, 1)
