"""A training step on a CUDA device: launched without a wait, and to the numbers of a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baltoro.kernels.kda import fla
from baltoro.kernels.spans import Spans
from baltoro.trainer.config import TrainConfig
from baltoro.trainer.record import read_records
from baltoro.trainer.run import Run
from baltoro.trainer.step import launch_step, train_step
from tests.tiny import tiny_k3
from tests.trainer.harness import make_data, tiny_recipe

# where fla is installed, it tries its kernels for two minutes in the first step
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def recipe(folder: Path, stage: int, **changes: object) -> TrainConfig:
    """One stage of the small recipe, with heads of a width that the KDA kernels take."""
    model = tiny_k3(num_mtp_layers=1, vision=None, kda_head_dim=64)
    config = tiny_recipe(make_data(folder), model=model, **changes)
    return replace(config, stages=(replace(config.stages[stage], until=1.0),))


@pytest.fixture
def tabulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KDA library's table waits for a stream of its own, on which nothing else is: that one wait is allowed."""
    real = fla.tabulate

    def allowed(spans: Spans) -> torch.Tensor:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return real(spans)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    monkeypatch.setattr(fla, "tabulate", allowed)


@pytest.mark.usefixtures("tabulate")
@pytest.mark.parametrize("stage", [0, 1], ids=["plain", "quantised"])
def test_a_bf16_step_is_launched_without_a_wait(tmp_path: Path, stage: int) -> None:
    run = Run.create(recipe(tmp_path, stage, dtype="bfloat16", device="cuda"))
    train_step(run)  # kernels are tuned and tables made in the first step
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [launch_step(run) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert [record.step for record in read_records(pending)] == [2, 3, 4]


def test_float32_steps_are_those_of_a_cpu(tmp_path: Path) -> None:
    losses = {}
    for device in ("cpu", "cuda"):
        run = Run.create(recipe(tmp_path / device, 0, device=device))
        losses[device] = [train_step(run) for _ in range(3)]
    for one, other in zip(losses["cpu"], losses["cuda"], strict=True):
        assert one.loss == pytest.approx(other.loss, abs=2e-3) and one.tokens == other.tokens
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=2e-2)


def test_bf16_steps_go_the_way_of_float32(tmp_path: Path) -> None:
    losses = {}
    for dtype in ("float32", "bfloat16"):
        run = Run.create(recipe(tmp_path / dtype, 0, device="cuda", dtype=dtype))
        losses[dtype] = [train_step(run).loss for _ in range(6)]
    assert losses["bfloat16"][0] == pytest.approx(losses["float32"][0], abs=0.05)
    assert losses["bfloat16"][-1] < losses["bfloat16"][0]
