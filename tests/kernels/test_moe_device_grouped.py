"""The form for a GPU's grouped products, run on a CPU: equal to the plain one, with gradients, the same every time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.kernels.moe import device_grouped, experts
from baltoro.kernels.moe.products import ExpertWeights
from baltoro.kernels.moe.reference import situ_glu

E, A, T, M, F = 6, 3, 41, 32, 64


def activation(gate: Tensor, up: Tensor) -> Tensor:
    return situ_glu(gate, up, beta=4.0, linear_beta=25.0)


def results(product: object, *, fake: bool, skew: bool) -> list[Tensor]:
    """Output and gradients of z, weights, w1, w3, w2."""
    torch.manual_seed(0)
    z = torch.randn(T, M).bfloat16().requires_grad_()
    shapes = ((E, F, M), (E, F, M), (E, M, F))
    w1, w3, w2 = ((torch.randn(shape) * 0.2).bfloat16().requires_grad_() for shape in shapes)
    weights = torch.rand(T, A, requires_grad=True)
    ids = torch.stack([torch.randperm(E - 1 if skew else E)[:A] for _ in range(T)])  # skewed: one expert has no token
    out = product(  # type: ignore[operator]
        z, ids, weights, ExpertWeights(w1, w3, w2), activation=activation, fake_weights=fake, fake_activations=fake
    )
    direction = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad((out.float() * direction).sum(), (z, weights, w1, w3, w2))]


@pytest.mark.parametrize("skew", [False, True], ids=["all experts", "one without tokens"])
@pytest.mark.parametrize("fake", [False, True], ids=["plain", "quantised"])
def test_it_equals_the_plain_form_with_gradients(fake: bool, skew: bool) -> None:
    found = results(device_grouped.expert_product, fake=fake, skew=skew)
    expected = results(experts.expert_product, fake=fake, skew=skew)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert (got.float() - wanted.float()).norm() < 1e-2 * wanted.float().norm()
    again = results(device_grouped.expert_product, fake=fake, skew=skew)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
