"""One safetensors file: its header read and checked, its bytes written one tensor at a time. No torch.

In: a path, or the list of tensors to write. Out: where each tensor lies; a finished file.
Invariants: a header is believed only when its tensors cover the file's bytes exactly, without gap or overlap, each
with as many bytes as its shape and dtype ask for; a file gets its final name only when it is whole and on disk.
Source: the safetensors format (8 bytes of header length, JSON, data).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from baltoro.errors import WeightsError
from baltoro.model.names import Dtype

FILE_DTYPES: dict[Dtype, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64", "uint8": "U8"}
FLOAT_DTYPES = frozenset({"BF16", "F16", "F32", "F64"})
# codes of tensors that we can measure; only those of FILE_DTYPES can be loaded
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
PARTIAL_SUFFIX = ".partial"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file declares it; `dtype` is the file's code."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Entry(Stored):
    """A tensor that lies in a file: `begin` counts from the start of the file."""

    path: Path
    begin: int


def read_header(path: Path) -> dict[str, Entry]:
    """Tensors of a file in the order of its header; their bytes are not read.

    Errors: WeightsError naming the file, and the tensor where there is one.
    """
    num_file_bytes = path.stat().st_size
    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        if num_file_bytes < 8 or not 2 <= num_header_bytes <= min(num_file_bytes - 8, MAX_HEADER_BYTES):
            raise WeightsError(f"{path} is not a whole safetensors file ({num_file_bytes} bytes); fetch it again")
        text = file.read(num_header_bytes)
    repeated: list[str] = []
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: pairs_to_dict(pairs, repeated))
    except ValueError as error:
        raise WeightsError(f"{path} has a header that is not JSON ({error}); fetch it again") from error
    if repeated:
        raise WeightsError(f"{path} names {repeated[0]} twice; write the file again")
    if not isinstance(header, dict):
        raise WeightsError(f"{path} has a header that is not an object; fetch it again")
    data = 8 + num_header_bytes
    entries = {name: _read_entry(path, name, fields, data) for name, fields in header.items() if name != "__metadata__"}
    _check_cover(path, entries, data, num_file_bytes)
    return entries


def pairs_to_dict(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    """A JSON object; keys that it has twice are added to `repeated`."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                repeated.append(key)
            seen.add(key)
    return found


def _read_entry(path: Path, name: str, fields: Any, data: int) -> Entry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise WeightsError(f"{path}: {name} lacks dtype, shape or data_offsets; write the file again") from error
    if dtype not in ITEM_BYTES:
        raise WeightsError(f"{path}: {name} has the unknown dtype {dtype!r}; known: {', '.join(ITEM_BYTES)}")
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, begin, end)):
        raise WeightsError(f"{path}: {name} has a shape or an offset that is not a count; write the file again")
    entry = Entry(name, dtype, shape, path, data + begin)
    if end - begin != entry.num_bytes:
        raise WeightsError(
            f"{path}: {name} is {dtype} {list(shape)}, {entry.num_bytes} bytes, but its offsets span {end - begin}; "
            "write the file again"
        )
    return entry


def _check_cover(path: Path, entries: dict[str, Entry], data: int, num_file_bytes: int) -> None:
    """The tensors fill the file, one after the other."""
    at = data
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.num_bytes)):
        if entry.begin != at:
            raise WeightsError(f"{path}: {entry.name} begins at byte {entry.begin} instead of {at}; fetch it again")
        at += entry.num_bytes
        if at > num_file_bytes:
            raise WeightsError(
                f"{path} is cut short: {entry.name} ends at byte {at} of {num_file_bytes}; fetch it again"
            )
    if at != num_file_bytes:
        raise WeightsError(f"{path} has {num_file_bytes - at} bytes that belong to no tensor; fetch it again")


class TensorFile:
    """Writes one file under a temporary name; `finish` makes it durable, `rename` gives it its name.

    Writer: whoever opened it. Tensors come in the order of `tensors`.
    """

    def __init__(self, path: Path, tensors: Sequence[Stored], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.partial = _partial(path)
        self.tensors = tensors
        self._num_written = 0
        self._file: BinaryIO = self.partial.open("wb")
        self._file.write(_header_bytes(self.tensors, metadata))

    @property
    def is_complete(self) -> bool:
        return self._num_written == len(self.tensors)

    def write(self, name: str, data: memoryview) -> None:
        """The bytes of the next tensor. Errors: WeightsError if it is not `name`'s turn or not as many bytes."""
        if self.is_complete or self.tensors[self._num_written].name != name:
            raise WeightsError(f"{name} is not the next tensor of {self.path}; write in the order of `tensors`")
        expected = self.tensors[self._num_written].num_bytes
        if data.nbytes != expected:
            raise WeightsError(f"{name} has {data.nbytes} bytes, its shape and dtype ask for {expected}")
        self._file.write(data)
        self._num_written += 1

    def finish(self) -> None:
        """Every byte on disk, still under the temporary name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def rename(self) -> None:
        """The final name; replaces a file that has it."""
        self.partial.replace(self.path)

    def discard(self) -> None:
        """Remove what has not got its final name."""
        self._file.close()
        self.partial.unlink(missing_ok=True)


def sorted_for_file(tensors: Iterable[Stored]) -> list[Stored]:
    """Wide dtypes first: every tensor then lies on a multiple of its item size, as readers that map the file need."""
    return sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}{PARTIAL_SUFFIX}")


def _header_bytes(tensors: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for tensor in tensors:
        offsets = [at, at + tensor.num_bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_text(path: Path, text: str) -> None:
    """A small file, whole or not at all."""
    partial = _partial(path)
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
