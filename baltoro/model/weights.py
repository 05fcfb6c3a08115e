"""Model files <-> parameters, one tensor at a time.

In: a model folder (config.json and safetensors under the published names). Out: a K3Model, or the folder again.
Invariants: beside the model at most one tensor is in memory; a tensor that already has its parameter's dtype is read
straight into it. Whatever the dtype, A_log, dt_bias, convolutions, KDA's output norm and the selection bias stay fp32
(fp64 in a float64 model). Whether experts are MXFP4 is decided by the names in the files; packed bytes are never
interpreted. Nothing is written before every name, shape and dtype has been checked.
Source: spec/k3.md section 2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from baltoro.errors import ShapeError, WeightsError
from baltoro.model.config import K3Config
from baltoro.model.decoder import K3Model
from baltoro.model.names import CONFIG_DTYPES, TensorSpec, param_specs, tensor_specs
from baltoro.model.tensor_file import FILE_DTYPES, Entry, Stored, write_text
from baltoro.model.weight_files import DEFAULT_MAX_FILE_BYTES, WeightFiles, WeightsWriter, listed

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
}


def load_model(folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> K3Model:
    """The model of a folder. `dtype` of activations and weights: the config's, unless given.

    Errors: ConfigError or WeightsError, before anything large is allocated, if the files do not fit the config.
    """
    config, pairs = match_folder(folder, dtype=dtype)
    model = K3Model(config, torch_dtype(config.dtype), device)
    _fill_all(model.tensors(), config, pairs)
    return model


def match_folder(
    folder: str | Path, *, dtype: torch.dtype | None = None
) -> tuple[K3Config, list[tuple[TensorSpec, Entry]]]:
    """The config of a folder's model as its files are, and which stored tensor fills which parameter.

    Errors: ConfigError or WeightsError if the files do not fit the config.
    """
    config = K3Config.load(folder)
    files = WeightFiles.open(folder)
    if dtype is not None:
        config = config.with_(dtype=dtype_word(dtype))
    config = config.with_(are_experts_packed=files.is_packed)
    return config, files.match(config)


def load_into(params: Mapping[str, Tensor], folder: str | Path, *, config: K3Config | None = None) -> None:
    """Fill the parameters of a model that exists, by the keys of its state_dict.

    Errors: WeightsError if the files do not fit the config (default: the folder's) or the experts are not kept the
    same way, ShapeError if `params` are not those of the config.
    """
    config = config or K3Config.load(folder)
    files = WeightFiles.open(folder)
    is_packed = any(name.endswith("experts.w1_packed") for name in params)
    if config.num_experts and files.is_packed != is_packed:
        kinds = {True: "MXFP4", False: "unquantised"}
        raise WeightsError(
            f"experts are {kinds[files.is_packed]} in {folder} and {kinds[is_packed]} in the model; "
            f"`baltoro convert` has --quantise and --dequantise"
        )
    config = config.with_(are_experts_packed=files.is_packed)
    _fill_all(params, config, files.match(config))


def save_model(
    model: K3Model,
    folder: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_MAX_FILE_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write config.json and the weights; other files of the folder stay, old weights are replaced.

    Tensors are written in the dtypes that names.py gives for the model's dtype. Several files are cut at
    `max_shard_bytes`. Errors: ShapeError if the model's parameters are not those of its config.
    """
    config = model.config.with_(dtype=dtype_word(model.dtype))
    save_params(model.tensors(), config, folder, max_shard_bytes=max_shard_bytes, metadata=metadata)


def save_params(
    params: Mapping[str, Tensor],
    config: K3Config,
    folder: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_MAX_FILE_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """`save_model` for parameters by the keys of a state_dict."""
    check_params(params, config)
    folder = Path(folder)
    specs = {spec.name: spec for spec in tensor_specs(config)}
    announced = (Stored(spec.name, FILE_DTYPES[spec.dtype], spec.shape) for spec in specs.values())
    with WeightsWriter(folder, announced, max_file_bytes=max_shard_bytes, metadata=metadata) as writer:
        for stored in writer.order:
            writer.write(stored.name, buffer_of(_file_value(params, specs[stored.name])))
        # before the files get their names: if this fails, the old weights are still there
        write_text(folder / "config.json", json.dumps(config.to_json(), indent=2, ensure_ascii=False) + "\n")


def check_params(params: Mapping[str, Tensor], config: K3Config) -> None:
    """Errors: ShapeError that names parameters which are not those of `config`."""
    specs = {spec.param: spec.shape for spec in param_specs(config)}
    wrong = [
        f"{name} {list(params[name].shape)} instead of {list(shape)}"
        for name, shape in specs.items()
        if name in params and tuple(params[name].shape) != shape
    ]
    kinds = {
        "missing": [name for name in specs if name not in params],
        "unexpected": [name for name in params if name not in specs],
        "misshapen": wrong,
    }
    found = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if found:
        raise ShapeError(f"parameters are not those of the config; {'; '.join(found)}")


class TensorReader:
    """Reads tensors of any files, one file open at a time. A context manager."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: FileIO | None = None

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, entry: Entry) -> Tensor:
        """One tensor as the file has it, in memory of its own."""
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        buffer = np.empty(entry.num_bytes, dtype=np.uint8)
        self.read_into(entry, buffer.data)
        return torch.from_numpy(buffer).view(TORCH_DTYPES[entry.dtype]).view(entry.shape)

    def read_into(self, entry: Entry, buffer: memoryview) -> None:
        """The bytes of one tensor. Errors: WeightsError that names it if the file has become shorter."""
        file = self._open(entry.path)
        file.seek(entry.begin)
        done = 0
        while done < entry.num_bytes:
            count = file.readinto(buffer[done:])
            if not count:
                raise WeightsError(f"{entry.path} ends inside {entry.name}; fetch it again")
            done += count

    def _open(self, path: Path) -> FileIO:
        if self._file is None or self._path != path:
            if self._file is not None:
                self._file.close()
            self._path, self._file = path, path.open("rb", buffering=0)
        return self._file


def buffer_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; no copy if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def torch_dtype(word: str) -> torch.dtype:
    """bfloat16 -> torch.bfloat16."""
    if word not in CONFIG_DTYPES:
        raise WeightsError(f"dtype {word!r} is not one of {', '.join(CONFIG_DTYPES)}")
    dtype: torch.dtype = getattr(torch, word)
    return dtype


def dtype_word(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bfloat16."""
    word = str(dtype).removeprefix("torch.")
    torch_dtype(word)
    return word


def fill_params(params: Mapping[str, Tensor], pairs: Iterable[tuple[TensorSpec, Entry]]) -> None:
    """Copy files into parameters, `params[spec.param]` each, in the order of `pairs` (see `WeightFiles.match`)."""
    with torch.no_grad(), TensorReader() as reader:
        for spec, entry in pairs:
            place = params[spec.param].detach()
            _fill(place if spec.index is None else place[spec.index], spec, entry, reader)


def _fill_all(params: Mapping[str, Tensor], config: K3Config, pairs: list[tuple[TensorSpec, Entry]]) -> None:
    """Fill all parameters of a model, once they are known to be those of its config."""
    check_params(params, config)
    fill_params(params, pairs)


def _fill(place: Tensor, spec: TensorSpec, entry: Entry, reader: TensorReader) -> None:
    is_same = place.dtype == TORCH_DTYPES[entry.dtype] and tuple(place.shape) == entry.shape
    if is_same and place.device.type == "cpu" and place.is_contiguous():
        reader.read_into(entry, buffer_of(place))
        return
    value = reader.read(entry)
    if spec.is_padded:  # what lies behind the heads is padding
        value = value.view(-1)[: place.shape[0]]
    place.copy_(value)


def _file_value(params: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    """What a file holds for `spec`: cut, padded and converted."""
    value = params[spec.param].detach()
    if spec.index is not None:
        value = value[spec.index]
    dtype = TORCH_DTYPES[FILE_DTYPES[spec.dtype]]
    if not spec.is_padded:
        return value.to(dtype)
    padded = torch.zeros(spec.shape, dtype=dtype)
    padded.view(-1)[: value.numel()] = value
    return padded
