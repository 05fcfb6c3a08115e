"""Rewrites a model folder tensor by tensor: other files, packed or unpacked experts; nothing else changes.

In: a model folder whose tensors fit its config. Out: a new folder with weights, config.json and the other files.
Invariants: beside one tensor and what is made of it nothing is in memory. A tensor that need not change is copied byte
for byte, packed experts above all. The new folder appears under its name when it is complete, or not at all.
Exactness: dequantising is exact; quantising rounds by the rule of kernels/quant/mxfp4.py.
Source: spec/k3.md 1.3 and 5.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from baltoro.errors import ConfigError, WeightsError
from baltoro.kernels.quant import mxfp4
from baltoro.model.config import K3Config
from baltoro.model.config_json import mxfp4_quantization_config
from baltoro.model.names import CONFIG_DTYPES, tensor_specs
from baltoro.model.tensor_file import FILE_DTYPES, Stored, write_text
from baltoro.model.weight_files import DEFAULT_MAX_FILE_BYTES, WeightFiles, WeightsWriter
from baltoro.model.weights import TORCH_DTYPES, TensorReader, buffer_of

# dtypes that hold every MXFP4 value exactly
DenseDtype = Literal["bf16", "fp32"]
WEIGHTS_SUFFIXES = (".safetensors", ".safetensors.index.json", ".index.json.gz", ".bin", ".pt", ".pth", ".gguf")
CONFIG_NAME = "config.json"


def convert(
    source: str | Path,
    target: str | Path,
    *,
    quantise: bool = False,
    dequantise: DenseDtype | None = None,
    max_shard_bytes: int = DEFAULT_MAX_FILE_BYTES,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `source` to `target`, which must not exist or be empty. `on_progress` is told bytes written and of all.

    quantise     routed experts become MXFP4, where they are not
    dequantise   routed experts become ordinary weights, where they are MXFP4
    Files of the source's top level that are no weights are copied.
    Errors: ConfigError for options that make no sense, WeightsError if the source's tensors do not fit its config or
    hold values that MXFP4 cannot.
    """
    source, target = Path(source), Path(target)
    _check_target(target)
    config = K3Config.load(source)
    files = WeightFiles.open(source)
    files.match(config)
    is_packed = _decide(config, files.is_packed, quantise=quantise, dequantise=dequantise)
    staging = target.parent / f".{target.name}.partial"
    if staging.exists():  # of a run that died
        shutil.rmtree(staging)
    try:
        staging.mkdir(parents=True)
        _Conversion(files, config, is_packed, on_progress).write(staging, max_shard_bytes)
        raw = json.loads((source / CONFIG_NAME).read_text())
        write_text(staging / CONFIG_NAME, json.dumps(_new_config(raw, is_packed), indent=2, ensure_ascii=False) + "\n")
        _copy_others(source, staging)
        staging.replace(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class _Conversion:
    """One run over the tensors. `pending` holds the other half of what quantising made of one tensor."""

    def __init__(
        self, files: WeightFiles, config: K3Config, is_packed: bool, on_progress: Callable[[int, int], None] | None
    ) -> None:
        self.entries = files.entries
        self.on_progress = on_progress
        self.pending: dict[str, Tensor] = {}
        self.tensors = []
        for spec in tensor_specs(config, packed=is_packed):
            kept = self.entries.get(spec.name)
            dtype, shape = (kept.dtype, kept.shape) if kept else (FILE_DTYPES[spec.dtype], spec.shape)
            self.tensors.append(Stored(spec.name, dtype, shape))

    def write(self, folder: Path, max_shard_bytes: int) -> None:
        total = sum(tensor.num_bytes for tensor in self.tensors)
        done = 0
        with TensorReader() as reader, WeightsWriter(folder, self.tensors, max_file_bytes=max_shard_bytes) as writer:
            for stored in writer.order:
                writer.write(stored.name, buffer_of(self._make(stored, reader)))
                done += stored.num_bytes
                if self.on_progress is not None:
                    self.on_progress(done, total)

    def _make(self, stored: Stored, reader: TensorReader) -> Tensor:
        name = stored.name
        if name in self.entries:
            return reader.read(self.entries[name])
        if name in self.pending:
            return self.pending.pop(name)
        base, _, half = name.rpartition(".weight")
        if not half:
            packed, scale = (reader.read(self.entries[f"{base}.weight_{part}"]) for part in ("packed", "scale"))
            return mxfp4.dequantise(packed, scale, TORCH_DTYPES[stored.dtype])
        weight = reader.read(self.entries[f"{base}.weight"])
        if not torch.isfinite(weight).all():
            raise WeightsError(f"{base}.weight holds values that are not finite; MXFP4 cannot hold them")
        packed, scale = mxfp4.quantise(weight)
        parts = {"_packed": packed, "_scale": scale}
        wanted = parts.pop(half)
        self.pending |= {f"{base}.weight{other}": value for other, value in parts.items()}
        return wanted


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file; give the folder to write")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; give a new folder, or empty this one first")


def _decide(config: K3Config, is_packed: bool, *, quantise: bool, dequantise: DenseDtype | None) -> bool:
    """Whether the new experts are packed."""
    if quantise and dequantise:
        raise ConfigError("quantise and dequantise exclude each other; give one of them")
    if (quantise or dequantise) and not config.num_experts:
        raise ConfigError("the model has no routed experts, and nothing else is quantised; leave the option out")
    word = CONFIG_DTYPES[config.dtype]
    if dequantise and dequantise != word:
        raise ConfigError(
            f"the config's dtype is {config.dtype}, and experts are to have that of the other weights; "
            f"give --dequantise {word} instead of {dequantise}"
        )
    return quantise or (is_packed and not dequantise)


def _new_config(raw: dict[str, Any], is_packed: bool) -> dict[str, Any]:
    """The source's config.json, every field kept, that says what the experts are."""
    new = dict(raw)
    text = new
    if isinstance(raw.get("text_config"), dict):
        text = new["text_config"] = dict(raw["text_config"])
    found = text.get("quantization_config") or raw.get("quantization_config")
    new.pop("quantization_config", None)
    text.pop("quantization_config", None)
    if is_packed:
        text["quantization_config"] = found or mxfp4_quantization_config()
    return new


def _copy_others(source: Path, folder: Path) -> None:
    """Tokenizer, generation settings, model card: what is no weights, no config and not hidden."""
    for path in source.iterdir():
        is_other = path.name != CONFIG_NAME and not path.name.startswith(".")
        if path.is_file() and is_other and not path.name.endswith(WEIGHTS_SUFFIXES):
            shutil.copy2(path, folder / path.name)
