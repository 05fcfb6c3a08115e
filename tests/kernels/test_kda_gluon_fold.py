"""The fold in Gluon: what it computes, against the reference. That states agree in every bit a GPU shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baltoro.kernels.kda import fused, fused_reference
from baltoro.kernels.kda.fused_reference import Window
from tests.kernels.gluon_by_torch import kernels

FILE = Path(fused.__file__).parent / "gluon_fold.py"
H, K, L, G = 2, 128, 2, 8


@pytest.mark.parametrize("rows", [16, 32, 128])
def test_direct_fold(rows: int) -> None:
    torch.manual_seed(0)
    slots, accepted = torch.tensor([3, 0, 1, 4]), torch.tensor([8, 5, 2, 0], dtype=torch.int32)
    states, histories = torch.randn(5, L, H, K, K), torch.randn(5, L, 3, 3 * H * K).bfloat16()
    window = Window.empty(4, G, heads=H, keys=K, values=K, dtype=torch.bfloat16, device="cpu", layers=L)
    for part in fused.window_parts(window):
        part.copy_(torch.rand(part.shape) * 0.1)
    window.decay[:, 2, 2:] = torch.nan  # what was not accepted has no effect
    wanted = states.clone(), histories.clone()
    views = [wanted[1][:, i] for i in range(L)], [wanted[0][:, i] for i in range(L)]
    window_clean = Window(*(part.nan_to_num() for part in fused.window_parts(window)))
    fused_reference.fold(window_clean, *views, slots, accepted)
    untouched = states[0].clone()
    kernels(FILE)["direct_fold_kernel"](
        (H * K // rows, 4, L), *fused.window_parts(window), histories, states, slots, accepted, 4, G, H,
        histories.stride(1), histories.stride(0), histories.stride(2), states.stride(1), states.stride(0), rows, 4, 4,
    )  # fmt: skip
    live = torch.tensor([1, 3, 4])
    assert torch.equal(histories[live], wanted[1][live]) and torch.equal(states[0], untouched)
    assert float((states[live] - wanted[0][live]).norm() / wanted[0][live].norm()) < 1e-6
