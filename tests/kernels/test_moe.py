"""Routing, activations and the expert product."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from baltoro.kernels.moe.experts import MAX_GATHERED_PAIRS, everywhere, expert_product, gathered, grouped, single
from baltoro.kernels.moe.products import ExpertWeights, Packed
from baltoro.kernels.moe.reference import route, silu_glu, situ_glu
from baltoro.kernels.quant import mxfp4, mxfp8

T, E, A, M, F = 9, 7, 3, 32, 64

sigmoid_route = partial(route, top_k=A, activation="sigmoid", is_renormalised=True, scaling=1.0)
situ = partial(situ_glu, beta=4.0, linear_beta=25.0)


# ---- route -----------------------------------------------------------------------------------------------------------


def test_ids_are_the_best_choices_and_weights_their_share_of_the_scores() -> None:
    logits, bias = torch.randn(T, E, dtype=torch.float64), torch.randn(E, dtype=torch.float64)
    ids, weights = sigmoid_route(logits, bias)
    assert ids.shape == weights.shape == (T, A) and ids.dtype == torch.int64
    for t in range(T):
        score = {e: 1 / (1 + math.exp(-float(logits[t, e]))) for e in range(E)}
        best = sorted(range(E), key=lambda e: -(score[e] + float(bias[e])))[:A]
        assert ids[t].tolist() == best
        total = sum(score[e] for e in best)
        expected = torch.tensor([score[e] / total for e in best], dtype=torch.float64)
        torch.testing.assert_close(weights[t], expected, atol=1e-12, rtol=0)


def test_bias_changes_the_choice_but_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    options = {"top_k": 2, "activation": "sigmoid", "is_renormalised": False, "scaling": 1.0}
    ids, weights = route(logits, torch.tensor([0.0, 0.0, 0.0, 5.0], dtype=torch.float64), **options)
    assert ids.tolist() == [[3, 0]]
    assert torch.equal(weights, torch.sigmoid(logits[:, [3, 0]]))


def test_weights_sum_to_one_then_are_scaled() -> None:
    logits = torch.randn(T, E, dtype=torch.float64)
    for activation in ("sigmoid", "softmax"):
        _, weights = sigmoid_route(logits, torch.randn(E, dtype=torch.float64), activation=activation, scaling=2.446)
        torch.testing.assert_close(weights.sum(-1), torch.full((T,), 2.446, dtype=torch.float64), atol=1e-12, rtol=0)


def test_softmax_scores_without_renormalising_are_the_softmax() -> None:
    logits = torch.randn(T, E, dtype=torch.float64)
    zero = torch.zeros(E, dtype=torch.float64)
    ids, weights = route(logits, zero, top_k=2, activation="softmax", is_renormalised=False, scaling=1.0)
    torch.testing.assert_close(weights, torch.softmax(logits, -1).gather(-1, ids), atol=1e-14, rtol=0)


def test_one_expert_keeps_its_score_even_when_renormalising_is_on() -> None:
    logits = torch.randn(T, E, dtype=torch.float64)
    ids, weights = sigmoid_route(logits, torch.zeros(E, dtype=torch.float64), top_k=1)
    torch.testing.assert_close(weights, torch.sigmoid(logits).gather(-1, ids), atol=1e-14, rtol=0)


def test_groups_are_ranked_by_their_two_best_choices() -> None:
    # group sums of the two best: 0.9 + 0.0, 0.6 + 0.5, 0.8 + 0.2 -> groups 1 and 2
    scores = torch.tensor([[0.9, 0.0, 0.0, 0.6, 0.5, 0.1, 0.8, 0.2, 0.0]], dtype=torch.float64).clamp(1e-9)
    ids, _ = sigmoid_route(torch.logit(scores), torch.zeros(9, dtype=torch.float64), num_groups=3, num_top_groups=2)
    assert ids.tolist() == [[6, 3, 4]]


def test_ties_go_to_the_lowest_expert() -> None:
    ids, _ = sigmoid_route(torch.zeros(2, E), torch.zeros(E))
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_gradient_flows_to_the_logits_through_the_weights_only() -> None:
    logits = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(E, dtype=torch.float64, requires_grad=True)
    ids, weights = sigmoid_route(logits, bias)
    (weights * torch.randn_like(weights)).sum().backward()
    assert bias.grad is None and logits.grad is not None
    is_chosen = torch.zeros(T, E, dtype=torch.bool).scatter(1, ids, True)
    assert ((logits.grad != 0) == is_chosen).all()


# ---- activations -----------------------------------------------------------------------------------------------------


def test_situ_is_the_formula_and_bounded_by_the_product_of_its_betas() -> None:
    for gate, up in ((0.3, -2.0), (-5.0, 60.0), (9.0, 1.0)):
        sigmoid = 1 / (1 + math.exp(-gate))
        expected = 4 * math.tanh(gate / 4) * sigmoid * 25 * math.tanh(up / 25)
        found = situ(torch.tensor(gate, dtype=torch.float64), torch.tensor(up, dtype=torch.float64))
        assert abs(float(found) - expected) < 1e-12
    big = torch.tensor([1e4, -1e4])
    assert situ(big[:1].expand(2), big).abs().max() <= 100.0


def test_situ_without_linear_beta_leaves_up_linear() -> None:
    gate, up = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64) * 50
    expected = 2 * torch.tanh(gate / 2) * torch.sigmoid(gate) * up
    torch.testing.assert_close(situ_glu(gate, up, beta=2.0, linear_beta=None), expected, atol=1e-12, rtol=0)


def test_activations_keep_the_input_dtype() -> None:
    gate, up = torch.randn(40).bfloat16(), torch.randn(40).bfloat16()
    assert situ(gate, up).dtype == silu_glu(gate, up).dtype == torch.bfloat16
    torch.testing.assert_close(situ(gate, up).float(), situ(gate.float(), up.float()), rtol=2**-8, atol=1e-6)


def test_silu_glu_is_the_formula() -> None:
    gate, up = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(silu_glu(gate, up), gate / (1 + torch.exp(-gate)) * up, atol=1e-14, rtol=0)


def test_situ_has_the_gradient_of_the_formula() -> None:
    gate, up = (torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(situ, (gate, up * 10))
    assert torch.autograd.gradcheck(partial(situ_glu, beta=1.5, linear_beta=None), (gate, up))


# ---- expert product --------------------------------------------------------------------------------------------------


def problem(num_tokens: int = T, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, ExpertWeights]:
    z = torch.randn(num_tokens, M, dtype=dtype)
    ids, weights = sigmoid_route(torch.randn(num_tokens, E, dtype=dtype) * 2, torch.zeros(E, dtype=dtype))
    shapes = ((E, F, M), (E, F, M), (E, M, F))
    return z, ids, weights, ExpertWeights(*(torch.randn(*s, dtype=dtype) * 0.2 for s in shapes))


def packed(experts: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(Packed(*mxfp4.quantise(w)) for w in (experts.w1, experts.w3, experts.w2)))


def naive(z: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
    out = torch.zeros_like(z)
    for t in range(len(z)):
        for a in range(ids.shape[1]):
            e = int(ids[t, a])
            out[t] += weights[t, a] * (experts.w2[e] @ situ(experts.w1[e] @ z[t], experts.w3[e] @ z[t]))
    return out


FORMS: list[Callable[..., Tensor]] = [gathered, grouped, everywhere, expert_product]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [1, T, 40])
def test_every_form_equals_a_loop_over_pairs(form: Callable[..., Tensor], num_tokens: int) -> None:
    args = problem(num_tokens)
    torch.testing.assert_close(form(*args, activation=situ), naive(*args), atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_packed_equals_dense_of_the_dequantised(form: Callable[..., Tensor]) -> None:
    z, ids, weights, experts = problem()
    small = packed(experts)
    dense = ExpertWeights(*(mxfp4.dequantise(w.packed, w.scale, z.dtype) for w in (small.w1, small.w3, small.w2)))
    before = small.w1.packed.clone()
    torch.testing.assert_close(
        form(z, ids, weights, small, activation=situ), naive(z, ids, weights, dense), atol=1e-12, rtol=0
    )
    assert torch.equal(small.w1.packed, before)
    for found, expected in zip(small.take(torch.tensor([4, 1]), z.dtype), (dense.w1, dense.w3, dense.w2), strict=True):
        assert torch.equal(found, expected[[4, 1]])


@pytest.mark.parametrize("num_tokens", [T, 40])
def test_fake_weights_give_what_packing_would(num_tokens: int) -> None:
    z, ids, weights, experts = problem(num_tokens)
    faked = expert_product(z, ids, weights, experts, activation=situ, fake_weights=True)
    expected = expert_product(z, ids, weights, packed(experts), activation=situ)
    torch.testing.assert_close(faked, expected, atol=1e-12, rtol=0)
    assert (faked - expert_product(z, ids, weights, experts, activation=situ)).abs().max() > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_fake_activations_quantise_the_inputs_of_both_products(form: Callable[..., Tensor]) -> None:
    z, ids, weights, experts = problem()
    expected = torch.zeros_like(z)
    coarse = mxfp8.fake(z)
    for t in range(T):
        for a in range(A):
            e = int(ids[t, a])
            hidden = mxfp8.fake(situ(experts.w1[e] @ coarse[t], experts.w3[e] @ coarse[t]))
            expected[t] += weights[t, a] * (experts.w2[e] @ hidden)
    found = form(z, ids, weights, experts, activation=situ, fake_activations=True)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("is_coarse", [False, True])
def test_one_token_alone_is_the_same_and_is_taken_without_a_batch(is_coarse: bool) -> None:
    z, ids, weights, experts = problem(1)
    options = {"activation": situ, "fake_activations": is_coarse}
    expected = gathered(z, ids, weights, experts, **options)
    torch.testing.assert_close(single(z, ids, weights, experts, **options), expected, atol=1e-12, rtol=0)
    with torch.no_grad():
        assert torch.equal(
            expert_product(z, ids, weights, experts, **options), single(z, ids, weights, experts, **options)
        )


@pytest.mark.parametrize("form", FORMS)
def test_gradients_equal_those_of_the_loop(form: Callable[..., Tensor]) -> None:
    z, ids, weights, experts = problem()
    dense = (experts.w1, experts.w3, experts.w2)
    leaves = [x.requires_grad_() for x in (z, weights, *dense)]
    seed = torch.randn_like(z)
    found = torch.autograd.grad(form(z, ids, weights, experts, activation=situ), leaves, seed)
    wanted = torch.autograd.grad(naive(z, ids, weights, experts), leaves, seed)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


@pytest.mark.parametrize("num_tokens", [T, 40])
def test_fake_quantised_weights_get_the_gradient_at_the_quantised_point(num_tokens: int) -> None:
    z, ids, weights, experts = problem(num_tokens)
    points = [mxfp4.fake(w).requires_grad_() for w in (experts.w1, experts.w3, experts.w2)]
    leaves = [w.requires_grad_() for w in (experts.w1, experts.w3, experts.w2)]
    seed = torch.randn_like(z)
    faked = expert_product(z, ids, weights, experts, activation=situ, fake_weights=True)
    at_points = expert_product(z, ids, weights, ExpertWeights(*points), activation=situ)
    found, wanted = torch.autograd.grad(faked, leaves, seed), torch.autograd.grad(at_points, points, seed)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


def test_experts_nobody_chose_get_zero_gradient() -> None:
    z, _, weights, experts = problem(20)
    ids = torch.tensor([[0, 2, 5]]).expand(20, A)
    leaves = [w.requires_grad_() for w in (experts.w1, experts.w3, experts.w2)]
    for grad in torch.autograd.grad(grouped(z, ids, weights, experts, activation=situ).sum(), leaves):
        assert (grad[[1, 3, 4, 6]] == 0).all() and (grad[[0, 2, 5]] != 0).any()


def test_result_does_not_depend_on_which_tokens_are_together() -> None:
    z, ids, weights, experts = problem(40)
    assert 40 * A > MAX_GATHERED_PAIRS > A
    together = expert_product(z, ids, weights, experts, activation=situ)
    alone = [
        expert_product(z[t : t + 1], ids[t : t + 1], weights[t : t + 1], experts, activation=situ) for t in range(40)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-12, rtol=0)


@torch.no_grad()
def test_small_dense_experts_ask_the_host_for_nothing_on_a_gpu() -> None:
    """However many tokens: a captured step may not. A device that holds no values cannot answer."""
    for num_tokens in (1, 40, 400):
        z, ids, weights, experts = problem(num_tokens)
        away = ExpertWeights(*(w.to("meta") for w in (experts.w1, experts.w3, experts.w2)))
        rows = z.to("meta"), ids.to("meta"), weights.to("meta")
        assert expert_product(*rows, away, activation=situ).shape == z.shape
        if num_tokens > 1:
            with pytest.raises((NotImplementedError, RuntimeError)):
                grouped(*rows, away, activation=situ)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_summed_in_float32_and_rounded_once(form: Callable[..., Tensor]) -> None:
    z, ids, weights, experts = problem(dtype=torch.float32)
    rounded = ExpertWeights(*(w.bfloat16() for w in (experts.w1, experts.w3, experts.w2)))
    y = form(z.bfloat16(), ids, weights, rounded, activation=situ)
    assert y.dtype == torch.bfloat16
    wide = ExpertWeights(*(w.float() for w in (rounded.w1, rounded.w3, rounded.w2)))
    expected = naive(z.bfloat16().float(), ids, weights, wide)
    assert (y.float() - expected).abs().max() < 0.02 * expected.abs().max()


def test_packed_experts_dequantised_in_several_batches_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    z, ids, weights, experts = problem(40)
    whole = grouped(z, ids, weights, packed(experts), activation=situ)
    for at_once in (1, 2 * M * F):
        monkeypatch.setattr("baltoro.kernels.moe.products.DEQUANTISE_AT_ONCE", at_once)
        assert torch.equal(grouped(z, ids, weights, packed(experts), activation=situ), whole)


def test_situ_in_several_tiles_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up = (torch.randn(7, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    seed = torch.randn(7, 5, dtype=torch.float64)
    whole = torch.autograd.grad(situ(gate, up), (gate, up), seed)
    monkeypatch.setattr("baltoro.kernels.moe.reference.CPU_TILE", 8)
    torch.testing.assert_close(situ(gate, up), 100 * torch.tanh(gate / 4) * torch.sigmoid(gate) * torch.tanh(up / 25))
    torch.testing.assert_close(torch.autograd.grad(situ(gate, up), (gate, up), seed), whole, atol=1e-15, rtol=0)


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ_is_the_same_with_and_without_gradients(linear_beta: float | None) -> None:
    gate, up = torch.randn(6, 5).bfloat16(), torch.randn(6, 5).bfloat16()
    before = gate.clone(), up.clone()
    with torch.no_grad():
        plain = situ_glu(gate, up, beta=4.0, linear_beta=linear_beta)
    assert torch.equal(plain, situ_glu(gate, up, beta=4.0, linear_beta=linear_beta))
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])
