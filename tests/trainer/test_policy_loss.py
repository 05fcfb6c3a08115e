"""Policy losses against autograd of the formulas as written, in float64; what each does that the others do not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baltoro.errors import ConfigError, ShapeError
from baltoro.trainer.aggregate import Totals, mean_log_ratios, row_weights
from baltoro.trainer.policy_config import ALGORITHMS, PolicyConfig
from baltoro.trainer.policy_loss import Terms, by_trajectory, capped, clipped, mirror, policy_terms

GATE = (math.log(0.8), math.log(1.28))
# of seven trajectories, some of one token
TRAJECTORY = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 4, 4, 5, 5, 5, 5, 6])


def _rows(seed: int = 0, spread: float = 0.4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """now, old, advantages (one a trajectory), mask; ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)
    count = len(TRAJECTORY)
    old = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    now = old + spread * torch.randn(count, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.3, -0.7, 0.4, -1.9, 2.2, 0.0, -0.1], dtype=torch.float64)[TRAJECTORY]
    mask = torch.rand(count, generator=generator) < 0.85
    return now.requires_grad_(), old, advantages, mask


def _gradient(losses: Tensor, now: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(losses.sum(), now)
    return found


def _written(formula: Callable[[float, float], Tensor], rows: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Gradient of sum over shown rows of a formula of (x, A), x a tensor with gradient: one row after the other."""
    now, old, advantages, mask = rows
    total = torch.zeros((), dtype=torch.float64)
    for t in mask.nonzero().flatten().tolist():
        total = total + formula(now[t] - old[t], float(advantages[t]))  # type: ignore[arg-type]
    return _gradient(total, now)


@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_clipped_is_the_written_formula(dual: float | None, seed: int) -> None:
    rows = _rows(seed)

    def formula(x, a):  # type: ignore[no-untyped-def]
        ratio = x.exp()
        found = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        return -(torch.maximum(found, torch.tensor(dual * a)) if dual is not None and a < 0 else found)

    terms = clipped(*rows, dual=dual)
    torch.testing.assert_close(_gradient(terms.losses, rows[0]), _written(formula, rows), rtol=1e-12, atol=0)
    now, _, advantages, mask = rows
    is_flat = mask & (advantages != 0) & (_gradient(clipped(*rows, dual=dual).losses, now) == 0)
    assert torch.equal(is_flat, terms.is_low | terms.is_high) and is_flat.any()


@pytest.mark.parametrize("seed", range(3))
def test_capped_and_mirror_are_the_written_formulas(seed: int) -> None:
    rows = _rows(seed, spread=1.0)

    def cispo(x, a):  # type: ignore[no-untyped-def]
        return -min(math.exp(float(x.detach())), 1.7) * a * x

    def kimi(x, a):  # type: ignore[no-untyped-def]
        return (-x.exp() * a if GATE[0] <= float(x.detach()) <= GATE[1] else 0.0) + 0.05 * x**2

    torch.testing.assert_close(_gradient(capped(*rows, max_ratio=1.7).losses, rows[0]), _written(cispo, rows))
    torch.testing.assert_close(_gradient(mirror(*rows, gate=GATE, tau=0.05).losses, rows[0]), _written(kimi, rows))


def _gspo(rows: tuple[Tensor, Tensor, Tensor, Tensor], low: float, high: float) -> tuple[Terms, Totals]:
    now, old, advantages, mask = rows
    of_step = Totals(torch.zeros(7, dtype=torch.int64).index_add(0, TRAJECTORY, mask.long()))
    mean = mean_log_ratios(now, old, mask, TRAJECTORY, of_step)
    return by_trajectory(now, old, advantages, mask, mean, low=low, high=high), of_step


@pytest.mark.parametrize("seed", range(3))
def test_by_trajectory_is_the_written_formula(seed: int) -> None:
    rows = _rows(seed)
    now, old, advantages, mask = rows
    written = torch.zeros((), dtype=torch.float64)
    lengths = [int((mask & (n == TRAJECTORY)).sum()) for n in range(7)]
    for n, length in enumerate(lengths):
        if length:
            mine = mask & (n == TRAJECTORY)
            ratio = ((now - old)[mine].sum() / length).exp()
            a = advantages[mine][0]
            written = written - torch.minimum(ratio * a, ratio.clamp(0.9, 1.15) * a) / sum(c > 0 for c in lengths)
    terms, of_step = _gspo(rows, 0.1, 0.15)
    loss = (terms.losses * row_weights(mask, TRAJECTORY, of_step, "trajectory_mean")).sum()
    torch.testing.assert_close(loss, written)
    torch.testing.assert_close(_gradient(loss, now), _gradient(written, now), rtol=1e-10, atol=1e-15)
    assert (terms.is_low | terms.is_high).any() and not (terms.is_low | terms.is_high).all()


def test_for_trajectories_of_one_token_gspo_is_grpo() -> None:
    now, old, advantages, mask = _rows()
    of_step = Totals(mask.long())
    mean = mean_log_ratios(now, old, mask, torch.arange(len(mask)), of_step)
    gspo = by_trajectory(now, old, advantages, mask, mean, low=0.2, high=0.28)
    grpo = clipped(now, old, advantages, mask, low=0.2, high=0.28)
    torch.testing.assert_close(gspo.losses, grpo.losses)
    torch.testing.assert_close(_gradient(gspo.losses, now), _gradient(grpo.losses, now))
    assert torch.equal(gspo.is_low, grpo.is_low) and torch.equal(gspo.is_high, grpo.is_high)
    longer, _ = _gspo(_rows(), 0.2, 0.28)
    assert not torch.allclose(longer.losses, grpo.losses)


def test_a_token_that_left_the_gate_is_pulled_back_where_the_clip_leaves_it() -> None:
    """A > 0 and far above, A < 0 and far below: PPO's gradient is 0, the mirror's points back to x = 0."""
    now = torch.tensor([1.5, -1.5], dtype=torch.float64, requires_grad=True)
    rows = (now, torch.zeros(2, dtype=torch.float64), torch.tensor([2.0, -2.0]).double(), torch.tensor([True, True]))
    assert _gradient(clipped(*rows).losses, now).tolist() == [0.0, 0.0]
    found = _gradient(mirror(*rows, gate=GATE, tau=0.05).losses, now)
    torch.testing.assert_close(found, 2 * 0.05 * now.detach())
    for start, advantage in ((1.5, 2.0), (-1.5, -2.0)):
        x, way = torch.tensor([start], dtype=torch.float64), []
        while not GATE[0] <= float(x) <= GATE[1]:
            way.append(abs(float(x)))
            one = (x.requires_grad_(), torch.zeros_like(x), torch.tensor([advantage]).double(), torch.tensor([True]))
            x = (x - _gradient(mirror(*one, gate=GATE, tau=0.05).losses, x)).detach()
        assert len(way) > 10 and way == sorted(way, reverse=True)


def test_the_gate_does_not_ask_for_the_sign_of_the_advantage() -> None:
    """Past the gate on the side that A would bring back, PPO still pushes with the whole ratio; the gate is shut."""
    now = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    rows = (now, torch.zeros(1, dtype=torch.float64), torch.tensor([-2.0]).double(), torch.tensor([True]))
    torch.testing.assert_close(_gradient(clipped(*rows).losses, now), 2.0 * now.detach().exp())
    torch.testing.assert_close(_gradient(mirror(*rows, gate=GATE, tau=0.05).losses, now), 0.1 * now.detach())


def test_inside_the_gate_the_minimum_is_where_the_two_forces_meet() -> None:
    """rho A = 2 tau x: solved on a grid of x for a tau so strong that the solution lies inside."""
    x = torch.linspace(*GATE, 100_001, dtype=torch.float64)
    ones = torch.ones_like(x)
    losses = mirror(x, 0 * x, 0.1 * ones, ones.bool(), gate=GATE, tau=0.4).losses
    best = x[losses.argmin()]
    assert abs(float(best.exp() * 0.1 - 2 * 0.4 * best)) < 1e-5


def test_capped_never_loses_a_gradient() -> None:
    now = torch.linspace(-9.0, 9.0, 64, dtype=torch.float64, requires_grad=True)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(32)
    shown = torch.ones(64, dtype=torch.bool)
    terms = capped(now, torch.zeros_like(now), signs, shown)
    found = _gradient(terms.losses, now)
    assert (found != 0).all() and found.abs().max() == 5.0
    assert torch.equal(terms.is_high, now.detach().exp() > 5.0)
    assert (_gradient(clipped(now, torch.zeros_like(now), signs, shown).losses, now) == 0).any()


def _all_terms(rows: tuple[Tensor, Tensor, Tensor, Tensor], mean: Tensor) -> list[Terms]:
    return [policy_terms(config, *rows, mean_log_ratio=mean) for config in ALGORITHMS.values()]


def test_on_policy_every_loss_has_the_gradient_of_reinforce() -> None:
    now, _, advantages, mask = _rows()
    rows = (now, now.detach(), advantages, mask)
    for terms in _all_terms(rows, torch.zeros_like(advantages)):
        expected = torch.where(mask, -advantages, 0.0)
        torch.testing.assert_close(_gradient(terms.losses, now), expected)
        assert not (terms.is_low | terms.is_high).any()


def test_hidden_rows_are_exactly_zero_and_shown_nan_is_seen() -> None:
    now, old, advantages, mask = _rows()
    broken = [torch.where(mask, values.detach(), torch.nan) for values in (now, old, advantages)]
    broken[0].requires_grad_()
    for terms in _all_terms((broken[0], broken[1], broken[2], mask), broken[1]):
        assert (terms.losses[~mask] == 0).all() and torch.isfinite(terms.losses).all()
        found = _gradient(terms.losses, broken[0])
        assert (found[~mask] == 0).all() and torch.isfinite(found).all()
    shown = torch.ones_like(mask)
    for terms in _all_terms((broken[0], broken[1], broken[2], shown), broken[1]):
        assert torch.isnan(terms.losses[~mask]).all()


def test_only_the_policy_now_has_a_gradient() -> None:
    now, old, advantages, mask = _rows()
    old.requires_grad_()
    advantages.requires_grad_()
    for terms in _all_terms((now, old, advantages, mask), old.detach()):
        found = torch.autograd.grad(terms.losses.sum(), (old, advantages), allow_unused=True)
        assert all(part is None for part in found)


def test_a_ratio_beyond_all_bounds_stays_finite() -> None:
    now = torch.tensor([500.0, -500.0], requires_grad=True)
    rows = (now, torch.zeros(2), torch.tensor([-1.0, -1.0]), torch.ones(2, dtype=torch.bool))
    for terms in _all_terms(rows, now.detach()):
        assert torch.isfinite(terms.losses).all() and torch.isfinite(_gradient(terms.losses, now)).all()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"clip_low": 1.0}, "clip_low"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"form": "mirror", "dual_clip": 3.0}, "leave it out"),
        ({"form": "by_trajectory", "aggregation": "token_mean"}, "trajectory_mean"),
        ({"aggregation": "fixed_length"}, "need each other"),
        ({"tis_high": 2.0}, "twice"),
        ({"tis_high": 0.5, "old": "trainer"}, "TIS"),
        ({"gate_low": 0.1}, "gate_low"),
        ({"tau": -1.0}, "tau"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PolicyConfig(**settings)  # type: ignore[arg-type]


def test_gspo_without_its_means_is_refused() -> None:
    with pytest.raises(ShapeError, match="mean_log_ratio"):
        policy_terms(ALGORITHMS["gspo"], *_rows())
