"""What a set of named bytes consists of: name, dtype, shape, place and SHA-256 of each tensor, and one version.

In: tensors as `Raw` bytes. Out: `Manifest`; `check` and `verify` refuse one that does not fit, with the check's name.
Invariants: digests are taken from the tensors themselves, before anything is flattened or cut, so a mistake in that is
seen as well; offsets grow, 64 bytes aligned, without overlap; a format that is not ours is refused, never guessed.
Not here: what the tensors are for, and how they travel (`channel`, `transaction`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import msgspec

from baltoro.errors import TransferError

FORMAT = 1
ALIGN_BYTES = 64  # a cache line, and more than any dtype needs
DTYPE_BYTES: Mapping[str, int] = {
    "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8_e4m3": 1, "uint8": 1, "int8": 1, "int32": 4, "int64": 8, "bool": 1,
}  # fmt: skip

Kind = tuple[str, tuple[int, ...]]  # dtype and shape


@dataclass(frozen=True, slots=True)
class Raw:
    """One tensor as bytes: contiguous, little-endian, row-major. `data` is a view, never a copy."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a manifest; `offset` from the first byte of all of them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    sha256: str

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of one version, in the order of their bytes."""

    version: int
    tensors: tuple[TensorEntry, ...]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Of everything, gaps included."""
        return self.tensors[-1].end if self.tensors else 0

    @property
    def digest(self) -> str:
        """SHA-256 of names, dtypes, shapes and digests: equal for equal contents, whatever the version."""
        lines = sorted(f"{t.name}\0{t.dtype}\0{t.shape}\0{t.sha256}\n" for t in self.tensors)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def decode(text: bytes) -> Manifest:
    """Errors: TransferError(format)."""
    try:
        return msgspec.json.decode(text, type=Manifest)
    except msgspec.MsgspecError as error:
        raise TransferError(f"this is no manifest: {error}", check="format") from error


def describe(version: int, tensors: Mapping[str, Raw]) -> Manifest:
    """The manifest of some tensors. Errors: TransferError(shapes) for bytes that are not those of dtype and shape."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, raw in tensors.items():
        num_bytes = _num_bytes(name, raw.dtype, raw.shape)
        if raw.data.nbytes != num_bytes or not raw.data.contiguous:
            why = f"{name} has {raw.data.nbytes} bytes; {raw.dtype} {raw.shape} has {num_bytes}, contiguous"
            raise TransferError(why, check="shapes")
        digest = hashlib.sha256(raw.data).hexdigest()
        entries.append(TensorEntry(name, raw.dtype, raw.shape, offset, num_bytes, digest))
        offset += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return Manifest(version=version, tensors=tuple(entries))


def check(
    manifest: Manifest,
    *,
    expected: Mapping[str, Kind] | None = None,
    before: Manifest | None = None,
    version: int = -1,
    must_change: bool = True,
) -> None:
    """Refuse a manifest that does not belong here. `version` is the one that is installed, `before` its manifest.

    Errors: TransferError with check = format, empty, names, shapes, layout, version or unchanged.
    """
    if manifest.format != FORMAT:
        raise TransferError(f"format {manifest.format} is not known here, only {FORMAT}", check="format")
    if not manifest.tensors:
        raise TransferError("there is no tensor in it", check="empty")
    _check_names(manifest, expected)
    _check_layout(manifest)
    if manifest.version <= version:
        why = f"version {manifest.version} is not newer than {version}, which is installed"
        raise TransferError(why, check="version")
    if must_change and before is not None and before.digest == manifest.digest:
        why = f"no tensor differs from version {before.version}; was the optimizer's step exported?"
        raise TransferError(why, check="unchanged")


def verify(manifest: Manifest, content: memoryview) -> None:
    """Compare every tensor with its digest. Errors: TransferError(digest) names the first few that differ."""
    wrong = [
        entry.name for entry, data in slices(manifest, content) if hashlib.sha256(data).hexdigest() != entry.sha256
    ]
    if wrong:
        names = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise TransferError(f"these bytes are not the ones that were sent: {names}", check="digest")


def slices(manifest: Manifest, content: memoryview) -> Iterator[tuple[TensorEntry, memoryview]]:
    """Each tensor with its bytes."""
    for entry in manifest.tensors:
        yield entry, content[entry.offset : entry.end]


def raws(manifest: Manifest, content: memoryview) -> dict[str, Raw]:
    """Name -> tensor, as views of `content`."""
    return {entry.name: Raw(entry.dtype, entry.shape, data) for entry, data in slices(manifest, content)}


def _check_names(manifest: Manifest, expected: Mapping[str, Kind] | None) -> None:
    names = [entry.name for entry in manifest.tensors]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise TransferError(f"named twice: {', '.join(twice[:3])}", check="names")
    if expected is None:
        return
    missing, unknown = sorted(expected.keys() - set(names)), sorted(set(names) - expected.keys())
    if missing or unknown:
        why = f"{len(missing)} missing {missing[:3]}, {len(unknown)} unexpected {unknown[:3]}"
        raise TransferError(why, check="names")
    for entry in manifest.tensors:
        if (entry.dtype, entry.shape) != expected[entry.name]:
            why = f"{entry.name} is {entry.dtype} {entry.shape}, not {expected[entry.name]}"
            raise TransferError(why, check="shapes")


def _check_layout(manifest: Manifest) -> None:
    at = 0
    for entry in manifest.tensors:
        if entry.num_bytes != _num_bytes(entry.name, entry.dtype, entry.shape):
            raise TransferError(f"{entry.name}: {entry.num_bytes} bytes are not those of its shape", check="shapes")
        if entry.offset < at or entry.offset - at >= ALIGN_BYTES:
            raise TransferError(f"{entry.name} lies at {entry.offset}, and the one before ends at {at}", check="layout")
        at = entry.end


def _num_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in DTYPE_BYTES or any(size < 0 for size in shape):
        known = ", ".join(DTYPE_BYTES)
        raise TransferError(f"{name} is {dtype} {shape}; dtypes are {known}, sizes not negative", check="shapes")
    return DTYPE_BYTES[dtype] * prod(shape)
