"""One step: what moves, denominators, quantisation-aware forwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baltoro.kernels.quant import mxfp4
from baltoro.model.build import new_model
from baltoro.model.context import FakeQuant, train_context
from baltoro.model.decoder import K3Model
from baltoro.trainer.evaluate import evaluate
from baltoro.trainer.pack import pack
from baltoro.trainer.qat import fake_quant
from baltoro.trainer.run import Run
from baltoro.trainer.sample import TrainSample
from baltoro.trainer.step import objective, train_step
from tests.tiny import tiny_k3
from tests.trainer.harness import make_data, tiny_recipe

CONFIG = tiny_k3(vision=None, num_mtp_layers=1)


def some_batch(seed: int = 0) -> list[TrainSample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in (20, 9, 14):
        ids = torch.randint(0, 131, (length + 1,), generator=generator)
        samples.append(TrainSample(ids[:-1], ids[1:], (torch.rand(length, generator=generator) > 0.3).float(), "x"))
    return samples


def gradients(model: K3Model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_every_trained_parameter_but_layer_0s_depth_query_gets_a_gradient() -> None:
    model = new_model(CONFIG, dtype=torch.float64, std=0.2, decay="slow")
    losses, ahead = objective(model, pack(some_batch()), FakeQuant())
    (losses.sum() + ahead).backward()
    without = {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}
    assert without == {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}


def test_mtp_reads_the_next_token_and_predicts_the_one_after() -> None:
    model = new_model(CONFIG, dtype=torch.float64, std=0.2, decay="slow")
    ids = torch.randint(0, 131, (12,))
    weights = torch.rand(11, dtype=torch.float64).round()
    with torch.no_grad():
        _, ahead = objective(model, pack([TrainSample(ids[:-1], ids[1:], weights, "x")]), FakeQuant())
        ctx = train_context(ids[:-1], (11,))
        logits = model.model.layers[-1].predict(ctx, model.hidden(ctx), ids[1:])[0]
        said = logits.log_softmax(dim=-1)
    # row t has seen ids[t] and ids[t + 1]; ids[t + 2] is target t + 1
    expected = -sum(said[t, ids[t + 2]] * weights[t + 1] for t in range(10))
    torch.testing.assert_close(ahead, expected)


def test_splitting_a_step_into_micro_batches_changes_only_rounding() -> None:
    samples = some_batch()
    model = new_model(CONFIG, dtype=torch.float64, std=0.2, decay="slow")
    weights = sum(float(s.weights.sum()) for s in samples)
    found = []
    for parts in ([samples], [[s] for s in samples]):
        model.zero_grad()
        for part in parts:
            batch = pack(part)
            losses, ahead = objective(model, batch, FakeQuant())
            ((losses * batch.weights).sum() / weights + 0.1 * ahead / weights).backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-8, atol=1e-12)


def test_fake_quantised_forward_is_that_of_packed_weights_and_its_gradient_goes_straight_through() -> None:
    batch = pack(some_batch())
    floats, packed = (new_model(CONFIG, dtype=torch.float64, std=0.2, decay="slow") for _ in range(2))
    experts = [p for name, p in packed.named_parameters() if ".experts." in name]
    with torch.no_grad():
        for p in experts:
            p.copy_(mxfp4.dequantise(*mxfp4.quantise(p), p.dtype))
    quantised, plain = objective(floats, batch, FakeQuant(weights=True))[0], objective(packed, batch, FakeQuant())[0]
    torch.testing.assert_close(quantised, plain)
    quantised.sum().backward()
    plain.sum().backward()
    for name, gradient in gradients(packed).items():
        torch.testing.assert_close(gradients(floats)[name], gradient, rtol=1e-6, atol=1e-9)


def test_inputs_of_experts_are_rounded_where_asked() -> None:
    model = new_model(CONFIG, std=0.2, decay="slow")
    batch = pack(some_batch())
    with torch.no_grad():
        plain, rounded = (objective(model, batch, FakeQuant(activations=on))[0] for on in (False, True))
    assert 1e-4 < float((plain - rounded).abs().mean()) < 0.5


def test_stages_switch_quantisation(tmp_path: Path) -> None:
    config = tiny_recipe(tmp_path)
    assert fake_quant(config.stages[0]) == FakeQuant()
    assert fake_quant(config.stages[1]) == FakeQuant(weights=True, activations=True)


@pytest.mark.slow
def test_training_lowers_the_loss_on_both_corpora(tmp_path: Path) -> None:
    config = tiny_recipe(make_data(tmp_path), steps=30)
    run = Run.create(replace(config, optim=replace(config.optim, lr=0.02)))
    before = evaluate(run)
    records = [train_step(run) for _ in range(30)]
    after = evaluate(run)
    assert all(after[name] < before[name] - 0.5 for name in ("prose", "talk"))
    assert records[-1].stage == 1 and records[0].stage == 0
    assert run.step == 30 and run.tokens == sum(record.tokens for record in records)


def test_evaluation_moves_nothing_and_repeats(tmp_path: Path) -> None:
    run = Run.create(tiny_recipe(make_data(tmp_path)))
    train_step(run)
    data = run.feed.state()
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    assert evaluate(run) == evaluate(run)
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
    assert run.feed.state() == data and run.balancer.update() == {}
