"""The balancer in a model: what it counts, and that the load evens out."""

from __future__ import annotations

import pytest
import torch

from baltoro.model.build import new_model
from baltoro.model.context import train_context
from baltoro.model.decoder import K3Model
from baltoro.trainer.balance.balancer import Balancer
from baltoro.trainer.config import BalanceConfig
from tests.tiny import tiny_k3


def skewed_model() -> K3Model:
    """A router that likes expert 2 and dislikes expert 5."""
    model = new_model(tiny_k3(vision=None), std=0.2, decay="slow")
    with torch.no_grad():
        for router in Balancer(model, BalanceConfig()).routers.values():
            router.e_score_correction_bias.zero_()
            router.e_score_correction_bias[2], router.e_score_correction_bias[5] = 0.5, -0.5
    return model


def run(model: K3Model, balancer: Balancer, seed: int, *, watched: bool = True) -> None:
    tokens = torch.randint(0, 131, (300,), generator=torch.Generator().manual_seed(seed))
    ctx = train_context(tokens, (100, 200))
    with torch.no_grad():
        if watched:
            with balancer.watching():
                model(ctx)
        else:
            model(ctx)


def test_load_evens_out_in_a_few_steps() -> None:
    model = skewed_model()
    balancer = Balancer(model, BalanceConfig())
    ratios = []
    for step in range(4):
        run(model, balancer, step)
        ratios.append(max(balancer.update().values()))
    assert ratios[0] > 2.5 and ratios[1] < 2.0 and ratios[3] < 1.6


def test_bias_has_mean_zero_and_moves_against_the_load() -> None:
    model = skewed_model()
    balancer = Balancer(model, BalanceConfig())
    run(model, balancer, 0)
    balancer.update()
    for router in balancer.routers.values():
        bias = router.e_score_correction_bias
        assert abs(float(bias.mean())) < 1e-6
        assert bias[2] < 0.5 and bias[5] > -0.5


def test_micro_batches_count_as_one_step() -> None:
    whole, halves = skewed_model(), skewed_model()
    tokens = torch.randint(0, 131, (120,))
    one, two = Balancer(whole, BalanceConfig()), Balancer(halves, BalanceConfig())
    with torch.no_grad():
        with one.watching():
            whole(train_context(tokens, (70, 50)))
        with two.watching():
            halves(train_context(tokens[:70], (70,)))
            halves(train_context(tokens[70:], (50,)))
    assert one.update() == two.update()
    for a, b in zip(one.routers.values(), two.routers.values(), strict=True):
        torch.testing.assert_close(a.e_score_correction_bias, b.e_score_correction_bias, rtol=0, atol=5e-3)


def test_forwards_outside_do_not_count_and_no_forward_changes_nothing() -> None:
    model = skewed_model()
    balancer = Balancer(model, BalanceConfig())
    run(model, balancer, 0, watched=False)
    assert balancer.update() == {}
    assert all(float(r.e_score_correction_bias[2]) == 0.5 for r in balancer.routers.values())


def test_sign_rule_moves_by_its_rate() -> None:
    model = skewed_model()
    balancer = Balancer(model, BalanceConfig(method="sign", sign_rate=0.01))
    run(model, balancer, 0)
    balancer.update()
    for router in balancer.routers.values():
        assert float(router.e_score_correction_bias[2]) == pytest.approx(0.49)
        assert float(router.e_score_correction_bias[5]) == pytest.approx(-0.49)


def test_none_leaves_the_bias_and_still_reports_the_load() -> None:
    model = skewed_model()
    balancer = Balancer(model, BalanceConfig(method="none"))
    run(model, balancer, 0)
    assert max(balancer.update().values()) > 2.5
    assert all(float(r.e_score_correction_bias[2]) == 0.5 for r in balancer.routers.values())
