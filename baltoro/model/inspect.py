"""Checks a checkpoint against its config without reading a weight. No torch.

In: a model folder, or an index (`.json` or `.json.gz`) whose files need not be there, and a config. Out: a `Report`.
What is checked: every name is claimed by exactly one parameter, and every parameter by one name; bytes sum to the
index's total; where the files are at hand, their headers agree with the index, the shapes and the dtypes.
Invariants: a broken checkpoint is a report with problems, not an error; only input that is no checkpoint is one.
Source: spec/k3.md sections 2 and 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baltoro.errors import WeightsError
from baltoro.model.config import K3Config
from baltoro.model.names import Group, TensorSpec, tensor_specs
from baltoro.model.tensor_file import FILE_DTYPES, Entry, read_header
from baltoro.model.weight_files import INDEX_NAME, PACKED_SUFFIX, SINGLE_NAME, Index, read_index

Kind = Literal["missing", "unexpected", "repeated", "shape", "dtype", "file", "bytes", "config"]


@dataclass(frozen=True, slots=True)
class Problem:
    """`name` is a tensor's or a file's; `message` says what is wrong with it."""

    kind: Kind
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Tally:
    """How many tensors, and their bytes."""

    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`total` counts what the config claims and the checkpoint has; bytes are the headers' where files are at hand."""

    total: Tally
    groups: dict[Group, Tally]
    index_bytes: int | None  # what the index says; a single file has no index
    num_files: int  # that the index names
    num_compared: int  # whose header was read
    is_packed: bool
    problems: tuple[Problem, ...]

    @property
    def is_good(self) -> bool:
        return not self.problems


def inspect_checkpoint(source: str | Path, config: str | Path | None = None) -> Report:
    """Check `source` against `config` (default: the config.json beside it).

    Errors: WeightsError if `source` is no checkpoint, ConfigError if the config cannot be used.
    """
    source = Path(source)
    folder = source if source.is_dir() else source.parent
    index = _read_source(source)
    k3 = K3Config.load(config if config is not None else folder)
    is_packed = any(name.endswith(PACKED_SUFFIX) for name in index.weight_map)
    specs = {spec.name: spec for spec in tensor_specs(k3, packed=is_packed)}
    entries, file_problems = _read_headers(folder, index)
    problems = [
        *_check_names(index, specs),
        *(_check_packing(k3, is_packed) if k3.num_experts else ()),
        *file_problems,
        *_check_entries(entries, specs),
    ]
    groups = _count(index, specs, entries)
    total = Tally(sum(t.num_tensors for t in groups.values()), sum(t.num_bytes for t in groups.values()))
    if index.total_bytes is not None and index.total_bytes != total.num_bytes:
        difference = total.num_bytes - index.total_bytes
        message = f"tensors sum to {total.num_bytes:,} bytes, the index says {index.total_bytes:,} ({difference:+,})"
        problems.append(Problem("bytes", "total_size", message))
    return Report(
        total=total,
        groups=groups,
        index_bytes=index.total_bytes,
        num_files=len(set(index.weight_map.values())),
        num_compared=len({entry.path for entry in entries.values()}),
        is_packed=is_packed,
        problems=tuple(problems),
    )


def _read_source(source: Path) -> Index:
    if source.is_dir():
        for name in (INDEX_NAME, f"{INDEX_NAME}.gz"):
            if (source / name).is_file():
                return read_index(source / name)
        if (source / SINGLE_NAME).is_file():
            header = read_header(source / SINGLE_NAME)
            return Index(dict.fromkeys(header, SINGLE_NAME), None, ())
        raise WeightsError(f"{source} holds neither {SINGLE_NAME} nor {INDEX_NAME}; give a model folder or an index")
    if not source.is_file():
        raise WeightsError(f"{source} does not exist; give a model folder or an index")
    if not source.name.endswith((".json", ".json.gz")):
        raise WeightsError(f"{source} is no index; give a model folder, a .json or a .json.gz")
    return read_index(source)


def _read_headers(folder: Path, index: Index) -> tuple[dict[str, Entry], list[Problem]]:
    """Headers of the files that are there, and how they differ from the index. No file at all is no problem."""
    files = sorted(set(index.weight_map.values()))
    present = [file for file in files if (folder / file).is_file()]
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    if not present:
        return entries, problems
    for file in files:
        if file not in present:
            problems.append(Problem("file", file, "the index names it, but it does not exist"))
    broken = set(files) - set(present)
    for file in present:
        try:
            header = read_header(folder / file)
        except WeightsError as error:
            problems.append(Problem("file", file, str(error)))
            broken.add(file)
            continue
        for name, entry in header.items():
            place = index.weight_map.get(name)
            if place == file:
                entries[name] = entry
            else:
                where = "does not know it" if place is None else f"looks for it in {place}"
                problems.append(Problem("unexpected", name, f"lies in {file}, but the index {where}"))
    for name, file in index.weight_map.items():
        if name not in entries and file not in broken:
            problems.append(Problem("missing", name, f"the index looks for it in {file}, which lacks it"))
    return entries, problems


def _check_names(index: Index, specs: dict[str, TensorSpec]) -> Iterator[Problem]:
    for name in index.repeated:
        yield Problem("repeated", name, "the index names it more than once")
    for name, spec in specs.items():
        if name not in index.weight_map:
            yield Problem("missing", name, f"the config asks for {spec.dtype} {list(spec.shape)}")
    for name, file in index.weight_map.items():
        if name not in specs:
            yield Problem("unexpected", name, f"no parameter of the config claims it (in {file})")


def _check_packing(config: K3Config, is_packed: bool) -> Iterator[Problem]:
    """Our loader goes by the names, others go by the config: they should agree."""
    if is_packed and not config.are_experts_packed:
        yield Problem("config", "quantization_config", "experts are MXFP4, but config.json does not say so")
    if config.are_experts_packed and not is_packed:
        yield Problem("config", "quantization_config", "config.json says MXFP4, but no weight_packed is there")


def _check_entries(entries: dict[str, Entry], specs: dict[str, TensorSpec]) -> Iterator[Problem]:
    for name, entry in entries.items():
        spec = specs.get(name)
        if spec is None:
            continue
        if not spec.accepts(entry.shape):
            message = f"{list(entry.shape)} in the file, {list(spec.shape)} by the config"
            yield Problem("shape", name, message)
        if entry.dtype != FILE_DTYPES[spec.dtype]:
            yield Problem("dtype", name, f"{entry.dtype} in the file, {FILE_DTYPES[spec.dtype]} by the config")


def _count(index: Index, specs: dict[str, TensorSpec], entries: dict[str, Entry]) -> dict[Group, Tally]:
    """Claimed tensors by group, groups in the order of the model."""
    counts: dict[Group, list[int]] = {}
    for name, spec in specs.items():
        if name in index.weight_map:
            count = counts.setdefault(spec.group, [0, 0])
            count[0] += 1
            count[1] += entries[name].num_bytes if name in entries else spec.num_bytes
    return {group: Tally(*count) for group, count in counts.items()}
