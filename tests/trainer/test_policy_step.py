"""One step of a policy: the same gradient for every split, nothing where nothing counts, the base untouched."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from baltoro.errors import ConfigError, InvariantError
from baltoro.model.build import new_model
from baltoro.trainer.first_adapter import first_adapter
from baltoro.trainer.policy_config import ALGORITHMS, FactorOptim, PolicyConfig
from baltoro.trainer.policy_sample import PolicySample, pack_policy
from baltoro.trainer.policy_step import PolicyTrainer
from tests.tiny import tiny_k3

MODEL = tiny_k3(num_layers=3, mla_layers=(1,), vision=None)
OPTIM = FactorOptim(lr=1e-2)


def make_trainer(
    loss: PolicyConfig | None = None, *, micro_tokens: int = 500, optim: FactorOptim = OPTIM
) -> PolicyTrainer:
    model = new_model(MODEL, dtype=torch.float64, seed=1, std=0.15, decay="slow")
    adapter = first_adapter(MODEL, rank=3, alpha=6.0, seed=2, dtype=torch.float64)
    return PolicyTrainer(model, adapter, loss or PolicyConfig(), optim, micro_tokens)


def make_samples(trainer: PolicyTrainer, count: int = 5) -> list[PolicySample]:
    """Lengths differ; a third of the tokens was put in by a tool; logprobs are near the trainer's own."""
    draw = torch.Generator().manual_seed(7)
    found = []
    for n in range(count):
        prompt, output = 3 + n, 7 + 5 * n
        tokens = tuple(torch.randint(0, 119, (prompt + output,), generator=draw).tolist())
        own = trainer.score(tokens[:prompt], tokens[prompt:])
        noise = (0.05 * torch.randn(output, generator=draw, dtype=torch.float64)).tolist()
        old = tuple(a + b for a, b in zip(own, noise, strict=True))
        counted = tuple(i % 3 != 1 for i in range(output))
        found.append(PolicySample(tokens, prompt, counted, old, float(n - 2) / 2))
    return found


def moved(loss: PolicyConfig, micro_tokens: int) -> list[torch.Tensor]:
    trainer = make_trainer(loss, micro_tokens=micro_tokens)
    for _ in range(2):  # the first step leaves every A alone: its gradient is 0 while B is
        assert trainer.step(make_samples(trainer)) is not None
    return [p.detach().clone() for p in trainer.factors]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "kimi"])
def test_every_split_into_micro_batches_moves_the_adapter_alike(name: str) -> None:
    loss = replace(ALGORITHMS[name], reference_kl=0.1)
    for whole, parts in zip(moved(loss, 500), moved(loss, 40), strict=True):
        torch.testing.assert_close(whole, parts, rtol=0, atol=1e-9)


def test_a_first_adapter_changes_no_logprob() -> None:
    trainer = make_trainer()
    ids = tuple(range(5, 40))
    assert trainer.score(ids[:4], ids[4:]) == trainer.score(ids[:4], ids[4:], has_adapter=False)
    assert trainer.norm == 0.0


def test_a_step_moves_the_factors_and_not_the_base() -> None:
    trainer = make_trainer()
    before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    record = trainer.step(make_samples(trainer))
    assert record is not None and record.probe > 0 and trainer.norm > 0
    assert record.num_grads == record.num_factors // 2  # every B, and no A while B is 0
    assert record.tokens == sum(sample.num_counted for sample in make_samples(trainer))
    assert all(torch.equal(before[name], t) for name, t in trainer.model.state_dict().items())
    assert not any(p.requires_grad for p in trainer.model.parameters())


def test_at_rate_zero_nothing_moves() -> None:
    trainer = make_trainer(optim=FactorOptim(lr=0.0))
    record = trainer.step(make_samples(trainer))
    assert record is not None and record.grad_norm > 0 and record.probe == 0.0 and trainer.norm == 0.0


def test_a_step_that_counts_nothing_changes_nothing() -> None:
    trainer = make_trainer()
    hidden = [replace(s, is_counted=(False,) * len(s.is_counted)) for s in make_samples(trainer)]
    assert trainer.step(hidden) is None
    assert trainer.steps == 0 and trainer.norm == 0.0


def test_a_step_without_a_gradient_moves_nothing_by_its_momentum() -> None:
    """Groups of equal rewards alone: what AdamW remembers of steps before does not go on."""
    trainer = make_trainer()
    for _ in range(2):
        trainer.step(make_samples(trainer))
    before = [p.detach().clone() for p in trainer.factors]
    record = trainer.step([replace(sample, advantage=0.0) for sample in make_samples(trainer)])
    assert record is not None and (record.num_grads, record.lr, record.probe) == (0, 0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.factors, strict=True))


def test_the_gradient_of_a_step_is_that_of_the_formula() -> None:
    """At ratio 1 GRPO's gradient is that of -A logp, averaged by trajectory: one token, one factor, by differences."""
    trainer = make_trainer(optim=FactorOptim(lr=0.0, max_grad_norm=None))
    tokens = tuple(range(3, 12))
    own = tuple(trainer.score(tokens[:4], tokens[4:]))
    sample = PolicySample(tokens, 4, (True,) * 5, own, 1.5)
    for batch in pack_policy([sample], 100):
        loss = -(1.5 * trainer.logprobs(batch)).mean()
        loss.backward()
    wanted = [p.grad.clone() for p in trainer.factors if p.grad is not None]
    trainer.adam.zero_grad()
    record = trainer.step([sample])
    assert record is not None
    norm = torch.stack([g.square().sum() for g in wanted]).sum().sqrt()
    assert record.grad_norm == pytest.approx(float(norm), rel=1e-9)
    assert record.drift.k3 < 1e-20


def test_state_goes_on_as_if_nothing_had_happened() -> None:
    one, two = make_trainer(), make_trainer()
    samples = make_samples(one)
    one.step(samples)
    two.load_state(deepcopy(one.state()))
    assert one.step(samples) == two.step(samples)
    assert all(torch.equal(a, b) for a, b in zip(one.factors, two.factors, strict=True))


def test_a_gradient_that_is_no_number_is_no_step() -> None:
    trainer = make_trainer()
    broken = [replace(s, advantage=float("nan")) for s in make_samples(trainer)]
    with pytest.raises(InvariantError, match="norm"):
        trainer.step(broken)
    assert trainer.norm == 0.0


def test_what_does_not_fit_is_refused() -> None:
    trainer = make_trainer(micro_tokens=10)
    with pytest.raises(ConfigError, match="micro_tokens"):
        trainer.step(make_samples(trainer))


def test_targets_of_an_adapter() -> None:
    attention = first_adapter(MODEL, rank=2, alpha=2.0, targets="attention", dtype=torch.float32)
    dense = first_adapter(MODEL, rank=2, alpha=2.0, targets="no_experts", dtype=torch.float32)
    assert all(".self_attn." in module for module in attention.factors)
    assert set(attention.factors) < set(dense.factors)
    assert not any(".experts." in module for module in dense.factors)
