"""The adapter that a policy's training begins with: at which sites, and its factors.

In: a model's config, rank, targets, a seed. Out: an Adapter in host memory.
Invariants: it changes nothing, since every B is 0; equal seeds give equal factors.
Source: spec/training.md A.5 (initial factors).
"""

from __future__ import annotations

import math

import torch

from baltoro.errors import ConfigError
from baltoro.model.adapter import LAYOUT, Adapter, LoraSettings, SiteFactors
from baltoro.model.adapter_names import adapter_sites
from baltoro.model.config import K3Config


def first_adapter(
    config: K3Config, *, rank: int, alpha: float, dtype: torch.dtype, targets: str = "all", seed: int = 0
) -> Adapter:
    """An adapter that changes nothing: A uniform (Xavier), B zero, at every site of `targets`."""
    sites = {module: site for module, site in adapter_sites(config).items() if wants_site(module, targets)}
    if not sites:
        raise ConfigError(f"adapter.targets {targets!r} leaves no layer of this model")
    has_experts = any(site.num_experts is not None for site in sites.values())
    settings = LoraSettings(rank, alpha, expert_layout=LAYOUT if has_experts else "")
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for module, site in sites.items():
        shape = site.shape("A", rank)
        bound = math.sqrt(6.0 / (shape[-1] + shape[-2]))
        a = (torch.rand(shape, generator=generator, dtype=torch.float64) * 2.0 - 1.0) * bound
        factors[module] = SiteFactors(a.to(dtype), torch.zeros(site.shape("B", rank), dtype=dtype), alpha / rank)
    return Adapter(settings, factors)


def wants_site(module: str, targets: str) -> bool:
    """Whether adapter.targets names this site."""
    return targets == "all" or (".self_attn." in module if targets == "attention" else ".experts." not in module)
