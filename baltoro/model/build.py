"""A new model with random weights, for training and for tests.

Two starts for the decay of KDA: "spread" gives every head channels with half-lives from a few to several hundred
tokens (training); "slow" makes states visible far away, so that a lost or misplaced state changes the output (tests;
default random gates hide such faults, see spec/serving.md G.0).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from baltoro.kernels.quant import mxfp4
from baltoro.model.config import K3Config
from baltoro.model.decoder import K3Model
from baltoro.model.kda import KDA
from baltoro.model.linear import RMSNorm
from baltoro.model.moe import Experts, Router

Decay = Literal["spread", "slow"]


def new_model(
    config: K3Config,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    std: float | None = None,
    decay: Decay = "spread",
) -> K3Model:
    """A K3Model with weights drawn from `seed`. `std` defaults to the config's initializer_range.

    Packed configs get random MXFP4 experts (quantised normal draws). With "slow" decay the router's selection bias
    and norm weights are random too, so that nothing is at its neutral value.
    """
    model = K3Model(config, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    std = config.initializer_range if std is None else std
    with torch.no_grad():
        for module in model.modules():
            _fill(module, config, generator, std, decay)
        for name, parameter in model.named_parameters():
            if name.endswith("conv1d.weight"):
                bound = config.conv_size**-0.5
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 2 * bound - bound)
    return model


def _fill(module: nn.Module, config: K3Config, generator: torch.Generator, std: float, decay: Decay) -> None:
    """Fill the parameters that `module` itself owns."""
    if isinstance(module, RMSNorm):
        jitter = torch.randn(module.weight.shape, generator=generator) * 0.1 if decay == "slow" else 0.0
        module.weight.copy_(torch.ones(module.weight.shape) + jitter)
        return
    if isinstance(module, Experts) and module.is_packed:
        _fill_packed(module, generator, std)
        return
    for name, parameter in module.named_parameters(recurse=False):
        if name in ("A_log", "dt_bias", "e_score_correction_bias"):
            continue
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    if isinstance(module, KDA):
        a_log, dt_bias = _decay(config, generator, decay)
        module.A_log.copy_(a_log)
        module.dt_bias.copy_(dt_bias)
    if isinstance(module, Router):
        noise = torch.randn(config.num_experts, generator=generator) * 0.1
        module.e_score_correction_bias.copy_(noise if decay == "slow" else torch.zeros_like(noise))


def _fill_packed(experts: Experts, generator: torch.Generator, std: float) -> None:
    for name in ("w1", "w2", "w3"):
        packed: Tensor = getattr(experts, f"{name}_packed")
        count, rows, half = packed.shape
        for expert in range(count):  # one at a time: a real layer does not fit twice
            codes, scale = mxfp4.quantise(torch.randn(rows, 2 * half, generator=generator) * std)
            packed[expert].copy_(codes)
            getattr(experts, f"{name}_scale")[expert].copy_(scale)


def _decay(config: K3Config, generator: torch.Generator, decay: Decay) -> tuple[Tensor, Tensor]:
    """A_log [H] and dt_bias [H*K] of one layer, for either gate form."""
    heads, width = config.kda_num_heads, config.kda_width
    jitter = torch.randn(heads, generator=generator) * 0.1
    if decay == "slow":
        if config.gate_lower_bound is not None:
            return jitter, torch.full((width,), -6.0) + torch.randn(width, generator=generator) * 0.3
        return jitter - 4.0, torch.randn(width, generator=generator) * 0.3
    # half-lives log-uniform between 2 and 512 tokens
    half_life = torch.exp(torch.rand(width, generator=generator) * math.log(256.0)) * 2.0
    rate = math.log(2.0) / half_life
    if config.gate_lower_bound is not None:
        return torch.zeros(heads), torch.logit(rate / -config.gate_lower_bound)
    return torch.zeros(heads), torch.log(torch.expm1(rate))
