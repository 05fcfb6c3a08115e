"""Per-head Muon: what orthogonalisation does, and that a head's update depends on that head alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from baltoro.model.build import new_model
from baltoro.trainer.config import OptimConfig
from baltoro.trainer.optim.groups import build_optimizers, muon_blocks
from baltoro.trainer.optim.muon import Muon, orthogonalise, update_scale
from tests.tiny import tiny_k3, tiny_kimi_linear


def stepped(weight: Tensor, gradient: Tensor, blocks: int, *, steps: int = 1) -> Tensor:
    """`weight` after some Muon steps on the same gradient."""
    parameter = nn.Parameter(weight.clone())
    muon = Muon([{"params": [parameter], "blocks": blocks}], lr=0.02)
    for _ in range(steps):
        parameter.grad = gradient.clone()
        muon.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(1, 128, 512), (1, 512, 128), (3, 24, 72)])
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert values.min() > 0.5 and values.max() < 1.3


def test_orthogonalise_keeps_the_singular_vectors() -> None:
    matrix = torch.randn(1, 12, 30, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix[0], full_matrices=False)
    middle = u.T @ orthogonalise(matrix)[0] @ v.T
    torch.testing.assert_close(middle, torch.diag(middle.diagonal()), rtol=0, atol=1e-10)


def test_each_block_is_normalised_by_itself() -> None:
    small, large = torch.randn(2, 16, 40, dtype=torch.float64)
    together = orthogonalise(torch.stack([small * 0.1, large * 1e3]))
    torch.testing.assert_close(together[0], orthogonalise(small[None])[0], rtol=1e-6, atol=1e-6)
    assert (together[0].norm() / together[1].norm()).item() == pytest.approx(1.0, abs=0.1)


def test_head_scales_do_not_show_in_the_update() -> None:
    """Spec C.7: 8 heads whose gradients span 100x; the whole-matrix update shows it, the per-head one does not."""
    scales = torch.logspace(0, 2, 8).repeat_interleave(32).unsqueeze(1)
    gradient, weight = torch.randn(256, 256) * scales, torch.zeros(256, 256)

    def spread(blocks: int) -> float:
        moved = stepped(weight, gradient, blocks).view(8, 32, 256)
        rms = moved.square().mean(dim=(1, 2)).sqrt()
        return float(rms.max() / rms.min())

    assert spread(8) < 1.1 < 1.5 < spread(1)


def test_shards_of_whole_heads_move_bit_identically() -> None:
    weight, gradient = torch.randn(2, 6 * 8, 40)
    whole = stepped(weight, gradient, 6, steps=3)
    for first, last in ((0, 1), (1, 3), (3, 6)):
        rows = slice(8 * first, 8 * last)
        assert torch.equal(stepped(weight[rows], gradient[rows], last - first, steps=3), whole[rows])


def test_rows_cut_through_a_matrix_do_not() -> None:
    """The counter-example: orthogonalising two halves of one block is another update."""
    weight, gradient = torch.zeros(32, 32), torch.randn(32, 32)
    whole, half = stepped(weight, gradient, 1), stepped(weight[:16], gradient[:16], 1)
    assert float((half - whole[:16]).norm() / whole[:16].norm()) > 0.2


def test_one_step_by_hand() -> None:
    weight, gradient = torch.randn(2, 5, 7, dtype=torch.float64)
    update = orthogonalise((1.95 * gradient)[None])[0] * 0.2 * math.sqrt(7)
    torch.testing.assert_close(stepped(weight, gradient, 1), weight * (1 - 0.02 * 0.1) - 0.02 * update)


def test_momentum_looks_ahead() -> None:
    """Second step, by hand: M = 0.95 G1 + G2, and 0.95 M + G2 is orthogonalised."""
    first, second = torch.randn(2, 5, 7, dtype=torch.float64)
    parameter = nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))
    muon = Muon([{"params": [parameter]}], lr=0.02, weight_decay=0.0)
    parameter.grad = first
    muon.step()
    before = parameter.detach().clone()
    parameter.grad = second
    muon.step()
    look = 0.95 * (0.95 * first + second) + second
    expected = before - 0.02 * 0.2 * math.sqrt(7) * orthogonalise(look[None])[0]
    torch.testing.assert_close(parameter.detach(), expected)


def test_scale_gives_the_rms_of_an_adam_update() -> None:
    update = orthogonalise(torch.randn(1, 64, 256)) * update_scale(64, 256)
    assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_parameters_of_a_group_do_not_touch_each_other() -> None:
    a, b = (nn.Parameter(torch.randn(12, 9)) for _ in range(2))
    gradient, before = torch.randn(12, 9), b.detach().clone()
    alone = stepped(a.detach(), gradient, 3)
    a.grad = gradient
    Muon([{"params": [a, b], "blocks": 3}], lr=0.02).step()
    torch.testing.assert_close(a.detach(), alone)
    assert torch.equal(b.detach(), before)  # no gradient, no decay


def test_blocks_are_heads_experts_or_the_whole_matrix() -> None:
    config = tiny_k3(num_mtp_layers=1)
    blocks = muon_blocks(new_model(config))
    assert blocks["model.layers.0.self_attn.q_proj.weight"] == config.kda_num_heads
    assert blocks["model.layers.0.self_attn.f_b_proj.weight"] == config.kda_num_heads
    assert blocks["model.layers.0.self_attn.f_a_proj.weight"] == 1
    assert blocks["model.layers.0.self_attn.o_proj.weight"] == 1
    assert blocks["model.layers.3.self_attn.q_b_proj.weight"] == config.num_heads
    assert blocks["model.layers.3.self_attn.kv_b_proj.weight"] == config.num_heads
    assert blocks["model.layers.3.self_attn.q_a_proj.weight"] == 1
    assert blocks["model.layers.3.block_sparse_moe.experts.w2"] == config.num_experts
    assert blocks["model.layers.3.block_sparse_moe.gate.weight"] == 1
    assert blocks["model.layers.7.eh_proj.weight"] == 1
    assert blocks["vision_tower.encoder.blocks.0.wqkv.weight"] == 3 * 3
    left_out = ("embed_tokens", "lm_head", "norm", "conv1d", "A_log", "dt_bias", ".b_proj", "res_proj", "shared_head")
    assert not [name for name in blocks if any(part in name for part in left_out)]
    assert not [name for name in blocks if "patch_embed" in name]


@pytest.mark.parametrize("config", [tiny_k3(num_mtp_layers=1), tiny_kimi_linear()], ids=["k3", "kimi_linear"])
def test_every_trainable_parameter_is_in_exactly_one_group(config: object) -> None:
    model = new_model(config)  # type: ignore[arg-type]
    muon, adam = build_optimizers(model, OptimConfig())
    held = [id(p) for optimizer in (muon, adam) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    vectors = {id(p) for p in model.parameters() if p.dim() < 2}
    decayed = {id(p) for group in adam.param_groups if group["weight_decay"] > 0 for p in group["params"]}
    assert not vectors & decayed
