"""The weights of a model folder: one safetensors file, or several with an index. No torch.

In: a folder, or the tensors to write. Out: where each published name lies; files and an index that name them.
Invariants: the index and the headers name the same tensors; files are whole before any gets its name, and the index,
which makes several files a model, comes last: a crash leaves the old model, the new one, or a folder without an
index that every loader refuses.
Source: spec/k3.md section 2; the index format of published checkpoints.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from baltoro.errors import WeightsError
from baltoro.model.config import K3Config
from baltoro.model.names import TensorSpec, tensor_specs
from baltoro.model.tensor_file import (
    FLOAT_DTYPES,
    PARTIAL_SUFFIX,
    Entry,
    Stored,
    TensorFile,
    pairs_to_dict,
    read_header,
    sorted_for_file,
    write_text,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
OUR_NAMES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
PACKED_SUFFIX = ".weight_packed"
DEFAULT_MAX_FILE_BYTES = 5_000_000_000
# files name it so that other loaders know the layout of tensors; the version is of our own use of metadata
METADATA = {"format": "pt", "baltoro_version": "1"}
NUM_NAMED = 5  # tensors that an error lists before it only counts


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Entries of all files of a folder by published name."""

    folder: Path
    entries: Mapping[str, Entry]

    @staticmethod
    def open(folder: str | Path) -> WeightFiles:
        """Read all headers. Errors: WeightsError if files are missing, broken, or not those of the index."""
        folder = Path(folder)
        index_path = folder / INDEX_NAME
        if not index_path.is_file():
            if not (folder / SINGLE_NAME).is_file():
                raise WeightsError(f"{folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}; give a model folder")
            return WeightFiles(folder, read_header(folder / SINGLE_NAME))
        weight_map = read_index(index_path).weight_map
        entries: dict[str, Entry] = {}
        for file_name in sorted(set(weight_map.values())):
            path = folder / file_name
            if not path.is_file():
                raise WeightsError(f"{path} is named by {INDEX_NAME} but does not exist; fetch it")
            for name, entry in read_header(path).items():
                if weight_map.get(name) != file_name:
                    raise WeightsError(f"{path} holds {name}, which {INDEX_NAME} does not look for there")
                entries[name] = entry
        lost = [name for name in weight_map if name not in entries]
        if lost:
            raise WeightsError(f"{INDEX_NAME} in {folder} names tensors that no file holds: {listed(lost)}")
        return WeightFiles(folder, entries)

    @property
    def is_packed(self) -> bool:
        """Whether the routed experts are MXFP4: what the files hold decides, not what the config says."""
        return any(name.endswith(PACKED_SUFFIX) for name in self.entries)

    def match(self, config: K3Config) -> list[tuple[TensorSpec, Entry]]:
        """Each tensor of the model with its place, in the order in which they lie.

        Errors: WeightsError that names what is missing, unexpected, misshapen or of a wrong dtype.
        """
        specs = {spec.name: spec for spec in tensor_specs(config, packed=self.is_packed)}
        shapes, dtypes = [], []
        for name, entry in self.entries.items():
            spec = specs.get(name)
            if spec is None:
                continue
            if not spec.accepts(entry.shape):
                shapes.append(f"{name} ({list(entry.shape)} in the file, {list(spec.shape)} by the config)")
            if not can_fill(spec, entry):
                dtypes.append(f"{name} ({entry.dtype} in the file, {spec.dtype} by the config)")
        missing = [name for name in specs if name not in self.entries]
        unexpected = [name for name in self.entries if name not in specs]
        kinds = {"missing": missing, "unexpected": unexpected, "misshapen": shapes, "of a wrong dtype": dtypes}
        found = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
        if found:
            raise WeightsError(
                f"the tensors in {self.folder} do not fit the config; {'; '.join(found)}. "
                f"{_advice(unexpected, config)}`baltoro inspect {self.folder}` lists them all"
            )
        pairs = [(specs[name], entry) for name, entry in self.entries.items()]
        return sorted(pairs, key=lambda pair: (pair[1].path, pair[1].begin))


def has_weights(folder: Path) -> bool:
    """Whether `WeightFiles.open` would find something."""
    return (folder / INDEX_NAME).is_file() or (folder / SINGLE_NAME).is_file()


@dataclass(frozen=True, slots=True)
class Index:
    """Which file holds which name. `repeated` are names that the JSON has more than once."""

    weight_map: dict[str, str]
    total_bytes: int | None
    repeated: tuple[str, ...]


def read_index(path: Path) -> Index:
    """A `.json` index, or one in gzip. Errors: WeightsError if this is no index."""
    repeated: list[str] = []
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        index = json.loads(text, object_pairs_hook=lambda pairs: pairs_to_dict(pairs, repeated))
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise WeightsError(f"{path} is not valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path} has no weight_map; fetch it again")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise WeightsError(f"{path} says that {name} lies in {file_name!r}, which is no file name")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(weight_map, int(total) if isinstance(total, int | float) else None, tuple(repeated))


def can_fill(spec: TensorSpec, stored: Stored) -> bool:
    """Whether the dtype can be converted: any float fills a float, packed bytes are taken as they are."""
    return stored.dtype == "U8" if spec.dtype == "uint8" else stored.dtype in FLOAT_DTYPES


def listed(names: list[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more


def _advice(unexpected: list[str], config: K3Config) -> str:
    """The setting that is likely wrong."""
    layers = {int(found[1]) for name in unexpected if (found := re.search(r"\.layers\.(\d+)\.", name))}
    past = config.num_layers + config.num_mtp_layers
    if layers and max(layers) >= past:
        return f"Layers from {past} on are MTP layers or too many: see num_nextn_predict_layers and num_hidden_layers. "
    return "Is config.json that of these files? "


class WeightsWriter:
    """Writes the files of a model one tensor at a time. Writer: whoever opened it, as a context manager.

    `order` gives the tensors in the order in which `write` wants them; one file is open at a time. Leaving the context
    without an error gives all files their names; with one, nothing is left behind and what was there is untouched.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Iterable[Stored],
        *,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if max_file_bytes < 1:
            raise WeightsError(f"max_file_bytes is {max_file_bytes}; it must be positive")
        self.folder = folder
        self._metadata = METADATA | dict(metadata or {})
        groups = list(_cut(tensors, max_file_bytes))
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        self._groups = dict(zip(names if len(names) > 1 else [SINGLE_NAME], groups, strict=True))
        self._done: list[TensorFile] = []
        self._file: TensorFile | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def order(self) -> Iterator[Stored]:
        return (tensor for group in self._groups.values() for tensor in group)

    def write(self, name: str, data: memoryview) -> None:
        """The bytes of the next tensor of `order`. Errors: WeightsError if it is another, or not as announced."""
        if self._file is None:
            self._file = self._open_next(name)
        self._file.write(name, data)
        if self._file.is_complete:
            self._file.finish()
            self._done.append(self._file)
            self._file = None

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if len(self._done) != len(self._groups):
                    written = {tensor.name for file in self._done for tensor in file.tensors}
                    missing = [tensor.name for tensor in self.order if tensor.name not in written]
                    raise WeightsError(f"not all tensors of {self.folder} were written: {listed(missing)}")
                self._rename()
        finally:
            for file in [*self._done, self._file]:
                if file is not None:
                    file.discard()

    def _open_next(self, name: str) -> TensorFile:
        if len(self._done) == len(self._groups):
            raise WeightsError(f"{name} was not announced to the writer of {self.folder}")
        file_name, group = list(self._groups.items())[len(self._done)]
        return TensorFile(self.folder / file_name, group, self._metadata)

    def _rename(self) -> None:
        index_path = self.folder / INDEX_NAME
        index_path.unlink(missing_ok=True)
        for file in self._done:
            file.rename()
        for old in self.folder.iterdir():
            is_partial = old.name.startswith(".") and old.name.endswith(PARTIAL_SUFFIX)  # of a writer that died
            name = old.name[1:].removesuffix(PARTIAL_SUFFIX) if is_partial else old.name
            if OUR_NAMES.fullmatch(name) and (is_partial or name not in self._groups):
                old.unlink()
        if len(self._groups) > 1:
            total = sum(tensor.num_bytes for tensor in self.order)
            weight_map = {tensor.name: name for name, group in self._groups.items() for tensor in group}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_text(index_path, json.dumps(index, indent=2) + "\n")


def _cut(tensors: Iterable[Stored], max_file_bytes: int) -> Iterator[list[Stored]]:
    """Consecutive runs of at most `max_file_bytes`; a larger tensor has a file of its own."""
    group: list[Stored] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.num_bytes > max_file_bytes:
            yield sorted_for_file(group)
            group, size = [], 0
        group.append(tensor)
        size += tensor.num_bytes
    yield sorted_for_file(group)
