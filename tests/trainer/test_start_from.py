"""A run that starts from a model folder: the same model as was exported, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baltoro.chat.tokenizer import Tokenizer
from baltoro.errors import ConfigError
from baltoro.kernels.quant import mxfp4
from baltoro.trainer.evaluate import evaluate
from baltoro.trainer.export import export
from baltoro.trainer.run import Run
from baltoro.trainer.step import train_step
from tests.trainer.harness import make_data, tiny_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path, Path]:
    """A run after its last step, its exported model, its data."""
    data, folder = make_data(tmp_path_factory.mktemp("data")), tmp_path_factory.mktemp("model")
    run = Run.create(tiny_recipe(data))
    for _ in range(run.config.steps):
        train_step(run)
    Tokenizer.of_bytes().save(data)
    export(run.model, folder, tokenizer=data, dtype="float32")
    return run, folder, data


def test_it_goes_on_as_the_model_that_was_exported(trained: tuple[Run, Path, Path]) -> None:
    old, folder, data = trained
    new = Run.create(tiny_recipe(data, init_from=str(folder), init_std=0.2))
    packed = {"w1", "w2", "w3"}
    for name, tensor in new.model.tensors().items():
        expected = old.model.tensors()[name]
        if name.rsplit(".", 1)[-1] in packed:
            expected = mxfp4.fake(expected)
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0, msg=name)
    new.step = new.config.steps  # the quantised stage, as the old one's
    assert evaluate(new) == pytest.approx(evaluate(old), abs=1e-6)


def test_a_bf16_run_computes_on_them_from_its_first_step(trained: tuple[Run, Path, Path]) -> None:
    _, folder, data = trained
    new = Run.create(tiny_recipe(data, init_from=str(folder), dtype="bfloat16"))
    for name, tensor in new.worker.tensors().items():
        assert torch.equal(tensor.float(), new.model.tensors()[name].to(tensor.dtype).float()), name


def test_another_model_is_refused_by_the_keys_that_differ(trained: tuple[Run, Path, Path]) -> None:
    old, folder, data = trained
    other = old.config.model.with_(rms_norm_eps=1e-3)
    with pytest.raises(ConfigError, match="another model than the recipe's, in rms_norm_eps"):
        Run.create(tiny_recipe(data, model=other, init_from=str(folder)))
