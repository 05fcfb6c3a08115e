"""Random adapters for tests: any sites, any rank, all values different from zero."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baltoro.model.adapter import LAYOUT, Adapter, LoraSettings, SiteFactors
from baltoro.model.adapter_names import AdapterSite, adapter_sites
from baltoro.model.config import K3Config


def random_adapter(
    config: K3Config,
    rank: int,
    *,
    seed: int = 0,
    std: float = 0.1,
    alpha: float | None = None,
    dtype: torch.dtype = torch.float32,
    wants: Callable[[AdapterSite], bool] = lambda _: True,
) -> Adapter:
    """Factors at every site that `wants` picks; alpha is twice the rank unless said otherwise."""
    generator = torch.Generator().manual_seed(seed)
    alpha = 2.0 * rank if alpha is None else alpha

    def draw(site: AdapterSite, side: str) -> Tensor:
        return (torch.randn(site.shape(side, rank), generator=generator) * std).to(dtype)

    factors = {
        module: SiteFactors(draw(site, "A"), draw(site, "B"), alpha / rank)
        for module, site in adapter_sites(config).items()
        if wants(site)
    }
    return Adapter(LoraSettings(rank, alpha, expert_layout=LAYOUT), factors)


def without_b(adapter: Adapter) -> Adapter:
    """The same with B zero: an adapter that changes nothing."""
    factors = {m: SiteFactors(f.a, torch.zeros_like(f.b), f.scale) for m, f in adapter.factors.items()}
    return Adapter(adapter.settings, factors)
