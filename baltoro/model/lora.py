"""The device's side of adapters: buffers of fixed size at every site, which layers add to their products.

In: a model, how many adapter slots, the largest rank. Out: an AdapterBank; installing an adapter copies its factors
into one slot, in place, so that addresses never change. A site without factors in a slot costs nothing there.
The same factors serve a trainer: it installs where it starts, lets `AdapterBank.parameters` have gradients and steps
them; a forward reads and never writes them, `read` exports them. They are no part of the model's state_dict: a base has
the same files and fingerprint with or without a bank.
Invariants: slots count from 1, 0 is no adapter; ranks below the largest are zeros; the base is never written, except by
`merge_adapter`, which refuses a quantised one.
Source: spec/training.md A.5, B.2 (1, 2, 8, 9, 11).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from baltoro.errors import ConfigError, ShapeError, WeightsError
from baltoro.kernels.precision import acc_dtype
from baltoro.model.adapter import Adapter, SiteFactors
from baltoro.model.adapter_names import AdapterSite, adapter_sites
from baltoro.model.decoder import K3Model
from baltoro.model.linear import Factors, Linear
from baltoro.model.moe import Experts


@dataclass(frozen=True, slots=True)
class AdapterBank:
    """All buffers of one model. Writer: whoever installs (the runner, or a trainer's optimizer).

    factors  by path of the site in the model
    """

    num_slots: int
    max_rank: int
    factors: dict[str, Factors] = field(default_factory=dict)

    def parameters(self) -> Iterator[nn.Parameter]:
        """A and B of every site: what a trainer trains."""
        for one in self.factors.values():
            yield one.a
            yield one.b

    @property
    def num_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def check(self, adapter: Adapter) -> None:
        """Whether it fits into a slot. Errors: WeightsError says which limit is in the way."""
        if adapter.rank > self.max_rank:
            raise WeightsError(
                f"the adapter has rank {adapter.rank}, slots hold {self.max_rank}: start with a larger max_lora_rank"
            )
        lost = [module for module in adapter.factors if module not in self.factors]
        if lost:
            raise WeightsError(f"{lost[0]} has factors but no buffers here: start with lora_experts on")

    @torch.no_grad()
    def install(self, slot: int, adapter: Adapter) -> None:
        """Make `adapter` what slot `slot` holds; whatever was there is gone. Errors: as `check`."""
        self.check(adapter)
        for module, factors in self.factors.items():
            one = adapter.factors.get(module)
            if one is not None:
                factors.write(slot, one)
            else:
                factors.active.discard(slot)
                factors.scale[slot - 1] = 0.0  # what is left in the buffers counts nowhere, in fixed form too

    @torch.no_grad()
    def read(self, slot: int, adapter: Adapter) -> Adapter:
        """The contents of a slot as an adapter with the settings and ranks of `adapter`: what a trainer exports."""
        found = {}
        for module, one in adapter.factors.items():
            factors, rank = self.factors[module], one.rank
            a, b = factors.a[slot - 1, ..., :rank, :], factors.b[slot - 1, ..., :rank]
            found[module] = SiteFactors(a.clone(), b.clone(), one.scale)
        return Adapter(adapter.settings, found)


def add_adapters(
    model: K3Model, num_slots: int, max_rank: int, *, has_experts: bool = True, dtype: torch.dtype | None = None
) -> AdapterBank:
    """Give every site of `model` empty buffers, in the model's dtype unless said otherwise; replaces an older bank.

    Errors: ConfigError for no slot or no rank.
    """
    if num_slots < 1 or max_rank < 1:
        raise ConfigError(f"{num_slots} adapter slots of rank {max_rank}: both must be at least 1")
    bank = AdapterBank(num_slots, max_rank)
    modules = dict(model.named_modules())
    dtype = dtype or model.dtype
    for module, site in adapter_sites(model.config).items():
        if site.num_experts is not None and not has_experts:
            continue
        factors = _empty(site, bank, dtype, model.device)
        if site.num_experts is None:
            linear = modules[module]
            if not isinstance(linear, Linear):
                raise ShapeError(f"{module} is no Linear")
            linear.lora = factors
        else:
            at, _, matrix = module.rpartition(".")
            experts = modules[at]
            assert isinstance(experts, Experts)
            experts.lora[matrix] = factors
        bank.factors[module] = factors
    return bank


def _empty(site: AdapterSite, bank: AdapterBank, dtype: torch.dtype, device: torch.device) -> Factors:
    def zeros(side: str) -> nn.Parameter:
        shape = (bank.num_slots, *site.shape(side, bank.max_rank))
        return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

    scale = torch.zeros(bank.num_slots, dtype=acc_dtype(dtype), device=device)
    return Factors(zeros("A"), zeros("B"), scale)


@torch.no_grad()
def merge_adapter(model: K3Model, adapter: Adapter) -> None:
    """Add scale * B A to the base's weights, in place; the sums are taken in the accumulate dtype.

    Errors: WeightsError for a quantised base, before anything is written.
    """
    if model.config.num_experts and model.config.are_experts_packed:
        raise WeightsError(
            "an adapter is not merged into a quantised base: rounding to MXFP4 again keeps about a tenth of it and "
            "adds an error larger than it. Serve it beside the base (--lora-modules), or merge into the base that "
            "`baltoro convert --dequantise` writes"
        )
    params = dict(model.named_parameters())
    for module, one in adapter.factors.items():
        weight = params.get(f"{module}.weight", params.get(module))
        assert weight is not None
        acc = acc_dtype(weight.dtype)
        weight.copy_(weight.to(acc) + one.scale * (one.b.to(acc) @ one.a.to(acc)))
