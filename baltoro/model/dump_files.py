"""A dump in a folder: safetensors files and a manifest that says what they hold and what was run.

In: tensors in the order in which they came. Out: `dump-00001.safetensors`, ... and `manifest.json`.
Invariants: at most one file's tensors are in memory; the manifest comes last, so a folder without one is no dump; what
a manifest names lies in its file with the shape and dtype that it says.
Manifest: `version`; `ids`; `config_digest`, `dtype`, `is_training`, `is_oracle`, `has_gradients`, `loss`; `facts`
(commit, versions, device: for people); `tensors`, each name, shape, dtype, file; `floor`, the relative L2 by name of a
second run of the same, where one was made, and `floor_kind`, how it was made otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from baltoro.errors import WeightsError
from baltoro.model.config import K3Config
from baltoro.model.tensor_file import Entry, Stored, TensorFile, read_header, sorted_for_file, write_text
from baltoro.model.weights import TensorReader, buffer_of

MANIFEST = "manifest.json"
VERSION = 1
FILE_BYTES = 256 << 20
CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
# least relative difference of two neighbours, by a file's code
ROUNDING = {code: torch.finfo(dtype).eps for dtype, code in CODES.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies; `dtype` is the file's code."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str


@dataclass(slots=True, kw_only=True)
class Manifest:
    """See the module. Written to by the writer of the dump alone."""

    ids: tuple[int, ...]
    config_digest: str
    dtype: str
    is_training: bool = True
    is_oracle: bool = False
    has_gradients: bool = False
    loss: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    tensors: list[Place] = field(default_factory=list)
    floor: dict[str, float] = field(default_factory=dict)
    floor_kind: str | None = None
    version: int = VERSION

    def write(self, folder: Path) -> None:
        """Whole or not at all."""
        write_text(folder / MANIFEST, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Errors: WeightsError if the folder has none, or none of ours."""
        path = folder / MANIFEST
        if not path.is_file():
            raise WeightsError(f"{folder} holds no {MANIFEST}, so no whole dump; `baltoro compare dump` makes one")
        try:
            data = json.loads(path.read_text())
            if data["version"] != VERSION:
                raise WeightsError(f"{path} has version {data['version']}, this build reads {VERSION}; dump again")
            places = [Place(t["name"], tuple(t["shape"]), t["dtype"], t["file"]) for t in data["tensors"]]
            known = {item.name for item in fields(Manifest)}
            if unknown := data.keys() - known:
                raise WeightsError(f"{path} has unknown keys {sorted(unknown)}; dump again")
            return Manifest(**(data | {"ids": tuple(data["ids"]), "tensors": places}))
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"{path} is no manifest of a dump ({error}); dump again") from error


def config_digest(config: K3Config) -> str:
    """SHA-256 of what the model is, whatever dtype it runs in and however its experts are kept."""
    plain = config.with_(dtype="float32", are_experts_packed=False)
    return hashlib.sha256(json.dumps(plain.to_json(), sort_keys=True).encode()).hexdigest()


class DumpWriter:
    """Takes tensors one by one. A context manager: leaving it without an error writes the manifest.

    Errors: WeightsError if the folder is there and not empty, or a name comes twice.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, file_bytes: int = FILE_BYTES) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise WeightsError(f"{folder} is there and not empty; a dump needs a folder of its own")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.manifest = folder, manifest
        self._file_bytes = file_bytes
        self._waiting: dict[str, Tensor] = {}
        self._names: set[str] = set()
        self._num_files = 0

    def write(self, name: str, tensor: Tensor) -> None:
        """Copies the tensor."""
        if name in self._names:
            raise WeightsError(f"{name} was dumped twice")
        if tensor.dtype not in CODES:
            raise WeightsError(f"{name} is {tensor.dtype}; a dump holds floating point tensors")
        self._names.add(name)
        self._waiting[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(waiting.nbytes for waiting in self._waiting.values()) >= self._file_bytes:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._flush()
            self.manifest.write(self.folder)

    def _flush(self) -> None:
        if not self._waiting:
            return
        self._num_files += 1
        path = self.folder / f"dump-{self._num_files:05d}.safetensors"
        stored = [Stored(name, CODES[t.dtype], tuple(t.shape)) for name, t in self._waiting.items()]
        file = TensorFile(path, sorted_for_file(stored), {"format": "pt"})
        try:
            for one in file.tensors:
                file.write(one.name, buffer_of(self._waiting[one.name]))
            file.finish()
            file.rename()
        finally:
            file.discard()
        self.manifest.tensors += [Place(one.name, one.shape, one.dtype, path.name) for one in stored]
        self._waiting = {}


class Dump:
    """A dump that is read. `names` are in the order of the run."""

    def __init__(self, folder: Path) -> None:
        """Errors: WeightsError if files are missing or not as the manifest says."""
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._entries: dict[str, Entry] = {}
        places = self.manifest.tensors
        for file_name in {place.file for place in places}:
            if Path(file_name).name != file_name or not (folder / file_name).is_file():
                raise WeightsError(f"{folder / MANIFEST} names {file_name!r}, which is not there; dump again")
            self._entries |= read_header(folder / file_name)
        for place in places:
            found = self._entries.get(place.name)
            if found is None or (found.shape, found.dtype) != (place.shape, place.dtype):
                raise WeightsError(f"{folder}: {place.name} is not in {place.file} as the manifest says; dump again")
            if place.dtype not in ROUNDING:
                raise WeightsError(f"{folder}: {place.name} is {place.dtype}, a dump holds floating point tensors")
        self.names = tuple(place.name for place in places)
        if len(set(self.names)) < len(self.names):
            raise WeightsError(f"{folder / MANIFEST} names a tensor twice; dump again")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def rounding(self, name: str) -> float:
        """Least relative difference that the tensor's dtype can hold."""
        return ROUNDING[self._entries[name].dtype]

    def read(self, name: str) -> Tensor:
        """In memory of its own, as the file has it."""
        with TensorReader() as reader:
            return reader.read(self._entries[name])
