"""A merged mixture of experts in bf16, all of its Triton forms together, under the interpreter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from baltoro.kernels.dispatch import kernels_for
from baltoro.kernels.linear import fast as fast_linear
from baltoro.kernels.moe import fast_experts, fast_route
from baltoro.model.config import K3Config
from baltoro.model.moe import MoE


@pytest.mark.parametrize("order", ["published", "tiled"])
@pytest.mark.parametrize("tokens", [2, 40])
def test_a_layer_is_that_of_the_references(tokens: int, order: str) -> None:
    config = K3Config(
        vocab_size=64, hidden_size=128, num_layers=2, mla_layers=(1,), kda_num_heads=2, kda_head_dim=32,
        num_heads=2, kv_lora_rank=32, qk_rope_head_dim=16, max_position_embeddings=64, dtype="bfloat16",
        num_experts=12, num_active_experts=3, latent_size=64, has_latent_norm=True, expert_intermediate_size=96,
        num_shared_experts=1, are_experts_packed=True,
    )  # fmt: skip
    layer = MoE(config, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
        for name, buffer in layer.experts.named_buffers():
            low, high = (119, 123) if name.endswith("scale") else (0, 256)
            buffer.copy_(torch.randint(low, high, buffer.shape))
        layer.merge()
        x, plain = torch.randn(tokens, 128).bfloat16(), kernels_for(torch.device("cpu"))
        fast = replace(
            plain,
            route=fast_route.route,
            norm_linear=fast_linear.norm_linear,
            router_linear=fast_linear.router_linear,
            expert_product=fast_experts.expert_product,
        )
        no_quant = SimpleNamespace(weights=False, activations=False)
        out = []
        for kernels in (plain, fast):
            if order == "tiled" and kernels is fast:
                assert layer.experts.tile() == "" and layer.experts.weights().order == "tiled"
            ctx = SimpleNamespace(kernels=kernels, adapter_rows=None, is_training=False, fake_quant=no_quant)
            out.append(layer(x, ctx).float())
    assert (out[1] - out[0]).norm() < 2.5e-2 * out[0].norm()
