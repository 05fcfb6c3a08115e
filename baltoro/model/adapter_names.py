"""Where a model can carry an adapter: names and shapes of the factors at every site. No torch.

In: a K3Config. Out: one AdapterSite per linear layer of attention, MLPs, shared experts and latent projections, and per
matrix of routed experts. The router, embedding, head, depth queries, convolutions, vision and MTP layers carry none.

    dense          A [r, in]          B [out, r]
    experts w1 w3  A [1, r, in]       B [E, out, r]     the side of the layer's width is shared by all experts
    experts w2     A [E, r, in]       B [1, out, r]

A factor's name on the wire is its site's published name with `.lora_A.weight` or `.lora_B.weight`; on disk PEFT's
prefix comes before it. Read are both, with and without the model's own prefix, and the spelling of `transformers`.
Source: spec/training.md A.5, A.6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from baltoro.model.config import K3Config
from baltoro.model.names import LANGUAGE_PREFIX, param_specs

PEFT_PREFIX = "base_model.model."
SIDES = ("A", "B")
_FACTOR = re.compile(r"(?P<site>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_DENSE = re.compile(r"model\.layers\.\d+\.(?!.*_res_proj)\S+_(proj|mqa)\.weight")
_EXPERTS = re.compile(r"(?P<site>\S+\.experts\.(?P<matrix>w[123]))(_packed)?")
# modules of transformers' KimiLinear that it calls other than the published files do
_THEIRS = (("self_attn.forget_gate.", "self_attn."), ("mlp.shared_experts.", "block_sparse_moe.shared_experts."))


@dataclass(frozen=True, slots=True)
class AdapterSite:
    """One place for a pair of factors. `module`: path in K3Model; `name`: published; `num_experts`: None if dense."""

    module: str
    name: str
    in_features: int
    out_features: int
    num_experts: int | None = None
    shared_side: str = ""

    def shape(self, side: str, rank: int) -> tuple[int, ...]:
        """Shape of a factor."""
        matrix = (rank, self.in_features) if side == "A" else (self.out_features, rank)
        if self.num_experts is None:
            return matrix
        return (1 if side == self.shared_side else self.num_experts, *matrix)


def adapter_sites(config: K3Config) -> dict[str, AdapterSite]:
    """Every site by its path in the model, layer by layer."""
    found = {}
    for spec in param_specs(config.with_(vision=None)):
        if spec.group == "mtp":
            continue
        if spec.num_experts is not None:
            match = _EXPERTS.fullmatch(spec.param)
            if match is None:  # the scales of packed experts
                continue
            is_down = match["matrix"] == "w2"
            sizes = (config.expert_width, config.expert_intermediate_size)
            inner, outer = sizes[::-1] if is_down else sizes
            name = spec.name.partition(".{}.")[0] + f".{match['matrix']}"
            side = "B" if is_down else "A"
            found[match["site"]] = AdapterSite(match["site"], name, inner, outer, spec.num_experts, side)
        elif _DENSE.fullmatch(spec.param):
            module, name = spec.param.removesuffix(".weight"), spec.name.removesuffix(".weight")
            found[module] = AdapterSite(module, name, spec.shape[1], spec.shape[0])
    return found


def site_of(name: str, sites: Mapping[str, AdapterSite]) -> tuple[AdapterSite, str] | None:
    """(site, A or B) of a tensor's name in any of the spellings; None if it names none."""
    match = _FACTOR.fullmatch(name)
    if match is None:
        return None
    module = match["site"].removeprefix(PEFT_PREFIX).removeprefix(LANGUAGE_PREFIX)
    for theirs, published in _THEIRS:
        if module not in sites:
            module = module.replace(theirs, published)
    site = sites.get(module)
    return None if site is None else (site, match["side"])


def factor_name(site: AdapterSite, side: str, *, on_disk: bool = False, is_theirs: bool = False) -> str:
    """Name of a factor; `is_theirs`: as transformers' KimiLinear spells its modules, for PEFT to find them there."""
    name = site.name
    if is_theirs:
        name = site.module
        if re.search(r"\.f_[ab]_proj$", name):
            name = name.replace("self_attn.", "self_attn.forget_gate.")
        name = name.replace("block_sparse_moe.", "mlp.")
    return f"{PEFT_PREFIX if on_disk else ''}{name}.lora_{side}.weight"
