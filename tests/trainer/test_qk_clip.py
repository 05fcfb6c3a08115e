"""QK-clip: every logit of a head that went over tau is scaled by the same factor, and nothing else moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baltoro.model.build import new_model
from baltoro.model.config import K3Config
from baltoro.model.context import train_context
from baltoro.model.decoder import K3Model
from baltoro.trainer.optim.qk_clip import QKClip
from tests.tiny import tiny_k3, tiny_kimi_linear

CONFIGS = pytest.mark.parametrize("config", [tiny_k3(vision=None), tiny_kimi_linear()], ids=["q_lora", "single q"])


def largest(model: K3Model, layer: str) -> Tensor:
    """Largest logit of each head of one layer on fixed tokens; the layer's input does not depend on its weights."""
    clip = QKClip(model, tau=1e9)
    with clip.watching(), torch.no_grad():
        model(train_context(torch.arange(40), (25, 15)))
    return clip.largest[layer]


@CONFIGS
def test_clipping_scales_the_largest_logit_of_each_head_to_tau(config: K3Config) -> None:
    model = new_model(config, dtype=torch.float64, std=0.3, decay="slow")
    name = f"model.layers.{config.mla_layers[0]}.self_attn"
    before = largest(model, name)
    tau = float(before.median())
    clip = QKClip(model, tau)
    with clip.watching(), torch.no_grad():
        model(train_context(torch.arange(40), (25, 15)))
    assert clip.apply() >= float(before.max())
    torch.testing.assert_close(largest(model, name), before.clamp(max=tau))


def test_values_and_shared_keys_stay() -> None:
    config = tiny_k3(vision=None)
    model = new_model(config, dtype=torch.float64, std=0.3, decay="slow")
    layer = model.model.layers[config.mla_layers[0]].self_attn
    kv = layer.kv_b_proj.weight.detach().view(config.num_heads, -1, config.kv_lora_rank).clone()
    shared = layer.kv_a_proj_with_mqa.weight.detach().clone()
    clip = QKClip(model, 1e-3)
    with clip.watching(), torch.no_grad():
        model(train_context(torch.arange(20), (20,)))
    clip.apply()
    after = layer.kv_b_proj.weight.detach().view_as(kv)
    nope = config.qk_nope_head_dim
    assert torch.equal(after[:, nope:], kv[:, nope:]) and not torch.equal(after[:, :nope], kv[:, :nope])
    assert torch.equal(layer.kv_a_proj_with_mqa.weight.detach(), shared)


def test_the_maximum_is_over_all_micro_batches_and_nothing_is_watched_outside() -> None:
    config = tiny_k3(vision=None)
    model = new_model(config, dtype=torch.float64, std=0.3, decay="slow")
    name, contexts = f"model.layers.{config.mla_layers[0]}.self_attn", []
    for first in (0, 40):
        contexts.append(train_context(torch.arange(first, first + 40), (40,)))
    alone = []
    for ctx in contexts:
        clip = QKClip(model, 1e9)
        with clip.watching(), torch.no_grad():
            model(ctx)
        alone.append(clip.largest[name])
    clip = QKClip(model, 1e9)
    with clip.watching(), torch.no_grad():
        for ctx in contexts:
            model(ctx)
    assert torch.equal(clip.largest[name], torch.maximum(*alone))
    clip.apply()
    with torch.no_grad():
        model(contexts[0])
    assert clip.apply() == 0.0


def test_without_tau_nothing_happens() -> None:
    model = new_model(tiny_k3(vision=None), std=0.3, decay="slow")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    clip = QKClip(model, None)
    with clip.watching(), torch.no_grad():
        model(train_context(torch.arange(20), (20,)))
    assert clip.apply() == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
