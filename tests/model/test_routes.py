"""Replayed routes: the experts are the ones that were told, the weights are the forward's own, with gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baltoro.errors import ShapeError
from baltoro.model.build import new_model
from baltoro.model.context import ForwardContext, train_context
from baltoro.model.decoder import K3Model
from baltoro.model.routes import MISSING, Routes, bytes_per_token, padded_routes
from tests.model.routing import own_routes, routers_of, watched, written
from tests.tiny import tiny_k3

CONFIG = tiny_k3(vision=None, media_token_id=None, num_layers=4, mla_layers=(3,), num_mtp_layers=1)
TOKENS = tuple((11 * n) % 97 for n in range(12))


@pytest.fixture(scope="module")
def model() -> K3Model:
    return new_model(CONFIG, dtype=torch.float64, std=0.2, decay="slow", seed=1)


def replaying(model: K3Model, ids: torch.Tensor) -> ForwardContext:
    return train_context(torch.tensor(TOKENS), (5, 7), routes=Routes.of(ids))


def packed_routes(model: K3Model) -> torch.Tensor:
    return torch.cat([own_routes(model, TOKENS[:5]), own_routes(model, TOKENS[5:])])


def other_routes(own: torch.Tensor) -> torch.Tensor:
    """Every expert another one; distinct as before."""
    return (own + 1) % CONFIG.num_experts


@torch.no_grad()
def test_a_models_own_routes_change_no_bit_and_others_are_taken(model: K3Model) -> None:
    own = packed_routes(model)
    plain = model(train_context(torch.tensor(TOKENS), (5, 7)))
    ctx = replaying(model, own.to(torch.int16))
    assert torch.equal(model(ctx), plain) and ctx.routes is not None and not ctx.routes.changed.any()
    ctx = replaying(model, other_routes(own))
    with watched(model) as taken:
        assert (model(ctx) - plain).abs().max() > 0.01
    assert torch.equal(torch.stack(taken, 1), other_routes(own))
    assert ctx.routes is not None and ctx.routes.changed.tolist() == [12, 12, 12]


@torch.no_grad()
def test_where_nothing_was_told_the_router_chooses(model: K3Model) -> None:
    """Of the second span only the last token has routes that differ: all before it is as it was."""
    own = packed_routes(model)
    ids = torch.full_like(own, MISSING)
    ids[11] = other_routes(own)[11]
    ctx = replaying(model, ids)
    plain, changed = model(train_context(torch.tensor(TOKENS), (5, 7))), model(ctx)
    assert torch.equal(changed[:11], plain[:11]) and not torch.equal(changed[11], plain[11])
    assert ctx.routes is not None and ctx.routes.changed.tolist() == [1, 1, 1]


def test_gradients_flow_into_the_router_through_the_weights_of_replayed_experts(model: K3Model) -> None:
    """Against differences in float64, of routes that the router would not have chosen."""
    ids = other_routes(packed_routes(model))
    gate = routers_of(model)[1].weight
    direction = torch.randn(gate.shape, generator=torch.Generator().manual_seed(2), dtype=gate.dtype)
    seed = torch.randn(12, CONFIG.vocab_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def loss() -> torch.Tensor:
        return (model(replaying(model, ids)).log_softmax(-1) * seed).sum()

    (grad,) = torch.autograd.grad(loss(), gate)
    found = float((grad * direction).sum())
    with torch.no_grad():
        step = 1e-6
        gate += step * direction
        up = float(loss())
        gate -= 2 * step * direction
        down = float(loss())
        gate += step * direction
    assert abs(found) > 1e-3 and found == pytest.approx((up - down) / (2 * step), rel=1e-5)


def test_the_weights_of_a_token_are_renormalised_over_its_replayed_experts(model: K3Model) -> None:
    gate, ids = routers_of(model)[0], other_routes(packed_routes(model))
    ctx = replaying(model, ids)
    logits = torch.randn(12, CONFIG.num_experts, dtype=torch.float64)
    taken, weights = gate.choose(logits, ctx)
    scores = torch.sigmoid(logits).gather(-1, ids[:, 0])
    assert torch.equal(taken, ids[:, 0])
    assert torch.allclose(weights, CONFIG.routed_scaling_factor * scores / scores.sum(-1, keepdim=True))


def test_an_mtp_layer_chooses_for_itself(model: K3Model) -> None:
    mtp = model.model.layers[CONFIG.num_layers]
    assert mtp.block_sparse_moe.gate.index is None
    assert [router.index for router in routers_of(model)] == [0, 1, 2]


def test_bytes_that_are_no_routes_of_the_trajectory_are_refused() -> None:
    size, good = bytes_per_token(CONFIG), written(torch.arange(3).expand(4, 3, 3))
    assert size == 3 * 3 * 2 and padded_routes(good, 6, CONFIG)[4:].eq(MISSING).all()
    for told, words in (
        (good[:-2], "a token takes 18 bytes"),
        (good, "at most 3 tokens"),
        (written(torch.tensor([0, 1, 11]).expand(1, 3, 3)), "experts 0 to 11 of 11"),
        (written(torch.tensor([0, 1, -1]).expand(1, 3, 3)), "experts -1 to 1"),
        (written(torch.tensor([0, 1, 1]).expand(1, 3, 3)), "twice"),
    ):
        with pytest.raises(ShapeError, match=words):
            padded_routes(told, 3 if "3 tokens" in words else 6, CONFIG)
    with pytest.raises(ShapeError, match="0 layers with experts"):
        padded_routes(good, 6, CONFIG.with_(num_experts=0))
    with pytest.raises(ShapeError, match="routes of 4 tokens"):
        replaying_wrong = Routes.of(torch.from_numpy(np.zeros((4, 3, 3), dtype=np.int16)))
        train_context(torch.tensor(TOKENS), (12,), routes=replaying_wrong)
