"""Packing: what lies where, and that nothing leaks from one document into another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baltoro.errors import ConfigError, ShapeError
from baltoro.model.build import new_model
from baltoro.model.context import FakeQuant, train_context
from baltoro.trainer.config import BatchConfig, StageConfig
from baltoro.trainer.data import Mixture
from baltoro.trainer.pack import fill, pack, step_batches
from baltoro.trainer.prepare import prepare
from baltoro.trainer.sample import NO_TARGET, TrainSample
from baltoro.trainer.step import objective
from tests.tiny import tiny_k3
from tests.trainer.harness import VOCAB, make_data

STAGE = StageConfig(until=1.0, max_length=24, mix={"prose": 0.6, "talk": 0.4})


def sample(length: int, seed: int, source: str = "x") -> TrainSample:
    ids = torch.randint(0, VOCAB, (length + 1,), generator=torch.Generator().manual_seed(seed))
    return TrainSample(ids[:-1], ids[1:], torch.ones(length), source)


def test_samples_lie_end_to_end() -> None:
    a, b = sample(3, 1, "a"), sample(5, 2, "b")
    batch = pack([a, b])
    assert batch.lengths == (3, 5) and batch.sources == ("a", "b") and batch.num_tokens == 8
    assert torch.equal(batch.tokens, torch.cat([a.tokens, b.tokens]))
    prepared = prepare(batch, tiny_k3(vision=None))
    assert prepared.sources == ("a", "b") and prepared.source_rows.tolist() == [0] * 3 + [1] * 5


def test_targets_further_ahead_stop_at_the_end_of_a_document() -> None:
    batch = pack([sample(3, 1), sample(1, 2), sample(2, 3)])
    targets, weights = batch.ahead(1)
    t = batch.targets.tolist()
    assert targets.tolist() == [t[1], t[2], NO_TARGET, NO_TARGET, t[5], NO_TARGET]
    assert weights.tolist() == [1, 1, 0, 0, 1, 0]
    assert torch.equal(batch.ahead(0)[0], batch.targets)


def test_sample_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(ShapeError):
        TrainSample(torch.zeros(3), torch.zeros(2), torch.zeros(3), "x")


def test_batches_keep_to_their_budget(tmp_path: Path) -> None:
    mixture = Mixture.open(make_data(tmp_path), "train", {"prose", "talk"}, unit_tokens=24, seed=1)
    batches = step_batches(mixture, STAGE, BatchConfig(tokens=200, micro_tokens=64))
    assert len(batches) == 3
    for batch in batches:
        assert 64 - 24 <= batch.num_tokens <= 64


def test_document_longer_than_a_micro_batch_is_an_error(tmp_path: Path) -> None:
    mixture = Mixture.open(make_data(tmp_path), "train", {"talk"}, unit_tokens=24, seed=1)
    with pytest.raises(ConfigError, match="micro_tokens"):
        fill(mixture, StageConfig(until=1.0, max_length=8, mix={"talk": 1.0}), 5)


def test_packed_logits_equal_those_of_each_document_alone() -> None:
    model = new_model(tiny_k3(vision=None), dtype=torch.float64, std=0.2, decay="slow")
    samples = [sample(length, seed) for seed, length in enumerate((5, 70, 1, 33))]
    batch = pack(samples)
    with torch.no_grad():
        together = model(train_context(batch.tokens, batch.lengths)).split(batch.lengths)
        for one, logits in zip(samples, together, strict=True):
            alone = model(train_context(one.tokens, (len(one),)))
            torch.testing.assert_close(logits, alone, rtol=1e-10, atol=1e-10)


def test_loss_of_a_document_has_no_gradient_at_the_others_tokens() -> None:
    config = tiny_k3(vision=None, num_mtp_layers=1)
    model = new_model(config, dtype=torch.float64, std=0.2, decay="slow")
    # ids of the three documents are disjoint, so embedding rows tell whose gradient it is
    batch = pack([TrainSample(ids[:-1], ids[1:], torch.ones(19), "x") for ids in torch.arange(60).view(3, 20)])
    losses, _ = objective(model, batch, FakeQuant())
    losses[19:38].sum().backward()  # type: ignore[no-untyped-call]
    gradient = model.model.embed_tokens.weight.grad
    assert gradient is not None
    touched = gradient.abs().sum(dim=1) > 0
    assert touched[20:39].all() and not touched[:20].any() and not touched[39:].any()


def test_mtp_loss_of_a_document_does_not_depend_on_its_neighbours() -> None:
    model = new_model(tiny_k3(vision=None, num_mtp_layers=1), dtype=torch.float64, std=0.2, decay="slow")
    samples = [sample(length, seed) for seed, length in enumerate((9, 17, 2))]
    with torch.no_grad():
        together = objective(model, pack(samples), FakeQuant())[1]
        alone = sum(objective(model, pack([one]), FakeQuant())[1] for one in samples)
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)
