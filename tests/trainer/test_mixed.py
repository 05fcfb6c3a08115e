"""A bf16 run: gradients of the rounded copy move float32 masters, and the two stay in step."""

from __future__ import annotations

from pathlib import Path

import torch

from baltoro.trainer.config import StageConfig
from baltoro.trainer.run import Run
from baltoro.trainer.step import train_step
from tests.tiny import tiny_k3
from tests.trainer.harness import make_data, tiny_recipe


def test_masters_are_float32_and_the_worker_is_their_rounding(tmp_path: Path) -> None:
    run = Run.create(tiny_recipe(make_data(tmp_path), dtype="bfloat16"))
    before = [p.detach().clone() for p in run.model.parameters()]
    train_step(run)
    moved = 0
    for old, master, copy in zip(before, run.model.parameters(), run.worker.parameters(), strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(master.to(copy.dtype), copy)
        assert copy.grad is None
        moved += not torch.equal(old, master)
    # all but the mix of layer 0, which has no gradient
    assert moved >= len(before) - 2


def test_a_small_step_is_not_lost_to_rounding(tmp_path: Path) -> None:
    """An update far below bf16's grid accumulates in the masters."""
    config = tiny_recipe(make_data(tmp_path), dtype="bfloat16")
    run = Run.create(config)
    name, master = next(iter(run.model.named_parameters()))
    copy = dict(run.worker.named_parameters())[name]
    start = copy.detach().clone()
    for _ in range(40):
        with torch.no_grad():
            master.add_(master.abs() * 2.0**-11)
        run.publish()
    assert (copy != start)[start != 0].float().mean() > 0.9


def test_a_bf16_run_learns_as_a_float32_run(tmp_path: Path) -> None:
    """All experts active and none quantised: rounding flips picks of a random router and steps of a coarse grid."""
    folder, losses = make_data(tmp_path), {}
    model = tiny_k3(num_mtp_layers=1, vision=None, num_active_experts=11)
    stages = (StageConfig(until=1.0, max_length=48, mix={"prose": 0.6, "talk": 0.4}),)
    for dtype in ("float32", "bfloat16"):
        run = Run.create(tiny_recipe(folder, dtype=dtype, model=model, stages=stages))
        losses[dtype] = [train_step(run).loss for _ in range(6)]
    for rough, exact in zip(losses["bfloat16"], losses["float32"], strict=True):
        assert abs(rough - exact) < 0.1
    assert losses["bfloat16"][-1] < losses["bfloat16"][0]


def test_a_resumed_bf16_run_goes_on_bit_identically(tmp_path: Path) -> None:
    config = tiny_recipe(make_data(tmp_path), dtype="bfloat16")
    run = Run.create(config)
    train_step(run)
    again = Run.create(config)
    again.load_state(run.state())
    assert train_step(run).loss == train_step(again).loss
