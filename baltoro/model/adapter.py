"""An adapter in host memory: its factors, how strongly they count, and what tells it from every other one.

In: tensors by name, or a folder, with PEFT's adapter_config.json. Out: `Adapter`, and the same folder again.
Invariants: names and shapes are checked strictly before anything is kept, and errors name the tensor; the digest covers
every byte that changes an output. One safetensors file; experts with the outer factor shared, as the config must say.
Not here: the place on the device (model/lora.py), versions and users (engine/adapters.py).
Source: spec/training.md A.6; the fields of PEFT's LoraConfig.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as safetensors_load
from torch import Tensor

from baltoro.errors import WeightsError
from baltoro.model.adapter_names import SIDES, AdapterSite, adapter_sites, factor_name, site_of
from baltoro.model.config import K3Config
from baltoro.model.tensor_file import FLOAT_DTYPES, Stored, TensorFile, read_header, sorted_for_file, write_text
from baltoro.model.weight_files import METADATA, listed
from baltoro.model.weights import TORCH_DTYPES, TensorReader, buffer_of

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
LAYOUT_KEY, LAYOUT = "expert_layout", "shared_outer"
# fields of PEFT that would change the formula: what they must be here
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "trainable_token_indices": (None, []),
}
_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """r, alpha and their exceptions by module name (PEFT's patterns)."""

    rank: int
    alpha: float
    is_rank_stabilised: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    expert_layout: str = ""

    @staticmethod
    def parse(fields: Mapping[str, Any]) -> LoraSettings:
        """From adapter_config.json. Errors: WeightsError names the field that cannot be served."""
        kind = fields.get("peft_type")
        if kind != "LORA":
            raise WeightsError(f"{CONFIG_NAME}: peft_type is {kind!r}; only LORA can be served")
        for name, allowed in _PLAIN.items():
            if fields.get(name) not in allowed:
                raise WeightsError(f"{CONFIG_NAME}: {name} is {fields[name]!r}, which a plain LoRA does not have")
        try:
            rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
            ranks = {str(k): int(v) for k, v in (fields.get("rank_pattern") or {}).items()}
            alphas = {str(k): float(v) for k, v in (fields.get("alpha_pattern") or {}).items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WeightsError(f"{CONFIG_NAME} needs numbers r and lora_alpha: {error!r}") from error
        if min(rank, *ranks.values(), rank) < 1 or not all(math.isfinite(a) for a in (alpha, *alphas.values())):
            raise WeightsError(f"{CONFIG_NAME}: r must be at least 1 and lora_alpha finite")
        is_stabilised = bool(fields.get("use_rslora"))
        return LoraSettings(rank, alpha, is_stabilised, ranks, alphas, str(fields.get(LAYOUT_KEY) or ""))

    def of(self, name: str) -> tuple[int, float]:
        """(rank, scale) of a site."""
        rank, alpha = _by_pattern(self.ranks, name, self.rank), _by_pattern(self.alphas, name, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def to_json(self, modules: list[str]) -> dict[str, Any]:
        """The fields that PEFT reads, and ours."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha.is_integer() else self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "use_rslora": self.is_rank_stabilised,
            "rank_pattern": dict(self.ranks),
            "alpha_pattern": dict(self.alphas),
            "target_modules": modules,
            "inference_mode": True,
            **({LAYOUT_KEY: self.expert_layout} if self.expert_layout else {}),
        }


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    for pattern, value in patterns.items():  # PEFT's rule: the end of a module's name
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return value
    return default


@dataclass(frozen=True, slots=True)
class SiteFactors:
    """A and B of one site (shapes: model/adapter_names.py) and the scale of their product."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.shape[-2])


@dataclass(frozen=True, slots=True)
class Adapter:
    """Factors by path of the site in the model."""

    settings: LoraSettings
    factors: Mapping[str, SiteFactors]

    @property
    def rank(self) -> int:
        """The largest."""
        return max(one.rank for one in self.factors.values())

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for one in self.factors.values() for t in (one.a, one.b))

    def digest(self) -> str:
        """Of everything that changes an output."""
        state = blake2b(digest_size=16)
        for module, one in sorted(self.factors.items()):
            state.update(repr((module, one.scale, one.a.dtype, one.a.shape, one.b.dtype, one.b.shape)).encode())
            state.update(buffer_of(one.a))
            state.update(buffer_of(one.b))
        return state.hexdigest()

    def tensors(self, config: K3Config, *, on_disk: bool = False, is_theirs: bool = False) -> dict[str, Tensor]:
        """Factors by name: the wire's, or the disk's."""
        sites, found = adapter_sites(config), {}
        for module, one in self.factors.items():
            for side, tensor in zip(SIDES, (one.a, one.b), strict=True):
                found[factor_name(sites[module], side, on_disk=on_disk, is_theirs=is_theirs)] = tensor
        return found


def adapter_from_tensors(tensors: Mapping[str, Tensor], fields: Mapping[str, Any], config: K3Config) -> Adapter:
    """Check everything and put it together; the tensors are kept, not copied.

    Errors: WeightsError that names what is unexpected, unpaired, misshapen, of a wrong dtype or not finite.
    """
    settings, sites = LoraSettings.parse(fields), adapter_sites(config)
    found: dict[str, dict[str, Tensor]] = {}
    unexpected = []
    for name, tensor in tensors.items():
        place = site_of(name, sites)
        if place is None or place[1] in found.get(place[0].module, {}):
            unexpected.append(name)
        else:
            found.setdefault(place[0].module, {})[place[1]] = tensor
    if unexpected:
        raise WeightsError(f"tensors of no site of this model, or given twice: {listed(unexpected)}")
    if not found:
        raise WeightsError("the adapter has no tensors: nothing was trained, or nothing was saved")
    factors = {module: _paired(sites[module], sides, settings) for module, sides in found.items()}
    has_experts = any(sites[module].num_experts is not None for module in factors)
    if has_experts and settings.expert_layout != LAYOUT:
        raise WeightsError(
            f"the adapter has factors of routed experts but {CONFIG_NAME} says {LAYOUT_KEY} "
            f"{settings.expert_layout!r}; their layout must be declared, and only {LAYOUT!r} can be served"
        )
    return Adapter(settings, factors)


def _paired(site: AdapterSite, sides: Mapping[str, Tensor], settings: LoraSettings) -> SiteFactors:
    rank, scale = settings.of(site.module)
    for side in SIDES:
        name = factor_name(site, side)
        if side not in sides:
            raise WeightsError(f"{name} is missing, its other factor is there")
        tensor, wanted = sides[side], site.shape(side, rank)
        if tuple(tensor.shape) != wanted:
            raise WeightsError(f"{name} is {list(tensor.shape)}, by model and {CONFIG_NAME} it must be {list(wanted)}")
        if not tensor.is_floating_point() or tensor.dtype not in _CODES:
            raise WeightsError(f"{name} is {tensor.dtype}; factors are {', '.join(sorted(FLOAT_DTYPES))}")
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{name} has values that are not finite")
    return SiteFactors(sides["A"].detach(), sides["B"].detach(), scale)


def adapter_from_bytes(data: bytes, fields: Mapping[str, Any], config: K3Config) -> Adapter:
    """From the bytes of a safetensors file. Errors: WeightsError."""
    try:
        tensors = safetensors_load(data)
    except SafetensorError as error:
        raise WeightsError(f"the tensors are no safetensors file: {error}") from error
    return adapter_from_tensors(tensors, fields, config)


def load_adapter(folder: str | Path, config: K3Config) -> Adapter:
    """The adapter of a folder. Errors: WeightsError that names file and tensor."""
    folder = Path(folder)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise WeightsError(f"{folder} has no {name}: give the folder of one adapter, on the engine's machine")
    try:
        fields = json.loads((folder / CONFIG_NAME).read_text())
    except ValueError as error:
        raise WeightsError(f"{folder / CONFIG_NAME} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise WeightsError(f"{folder / CONFIG_NAME} is no JSON object")
    entries = read_header(folder / WEIGHTS_NAME)
    wrong = [name for name, entry in entries.items() if entry.dtype not in FLOAT_DTYPES]
    if wrong:
        raise WeightsError(f"{folder / WEIGHTS_NAME}: of a dtype that factors cannot have: {listed(wrong)}")
    with TensorReader() as reader:
        tensors = {name: reader.read(entry) for name, entry in entries.items()}
    return adapter_from_tensors(tensors, fields, config)


def save_adapter(adapter: Adapter, folder: str | Path, config: K3Config, *, is_theirs: bool = False) -> None:
    """Write one safetensors file with PEFT's prefix, and adapter_config.json; the config comes last.

    `is_theirs`: module names of transformers' KimiLinear, so that PEFT finds them there (dense sites only).
    Errors: WeightsError for experts in a spelling that has no place for them.
    """
    sites = adapter_sites(config)
    if is_theirs and any(sites[module].num_experts is not None for module in adapter.factors):
        raise WeightsError("PEFT has no layout for experts that share a factor; save without `is_theirs`")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = adapter.tensors(config, on_disk=True, is_theirs=is_theirs)
    stored = sorted_for_file(Stored(n, _CODES[t.dtype], tuple(t.shape)) for n, t in sorted(tensors.items()))
    file = TensorFile(folder / WEIGHTS_NAME, stored, METADATA)
    for one in stored:
        file.write(one.name, buffer_of(tensors[one.name]))
    file.finish()
    file.rename()
    modules = sorted({module.rpartition(".")[2] for module in adapter.factors})
    text = json.dumps(adapter.settings.to_json(modules), indent=2, sort_keys=True)
    write_text(folder / CONFIG_NAME, text + "\n")
