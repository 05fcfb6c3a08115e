"""Corpora on disk: ids of documents, memory-mapped. No torch.

A data folder holds `manifest.json`, the tokenizer files, and for each corpus and split three flat little-endian files:
    NAME.SPLIT.tokens.bin   uint16 or uint32, all documents end to end
    NAME.SPLIT.index.bin    uint64, N + 1 offsets into it
    NAME.SPLIT.weights.bin  uint8 per token, 0 or 1: does its prediction count; absent: all count
Written by scripts/data/ (which render and tokenise), read here.
Invariants: files agree with the manifest's counts, or opening fails; a document has at least two tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from baltoro.config import build
from baltoro.errors import ConfigError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where text came from: a package, its version and licence, and the digest of what was read."""

    package: str
    version: str
    licence: str
    sha256: str
    documents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusEntry:
    """One corpus and split. `is_divisible`: documents may be cut anywhere (prose), or never (dialogue)."""

    name: str
    split: Split
    documents: int
    tokens: int
    dtype: Literal["uint16", "uint32"]
    has_weights: bool
    is_divisible: bool
    sha256: str
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The data folder. `builder` is the command that made it."""

    vocab_size: int
    corpora: tuple[CorpusEntry, ...]
    builder: str = ""
    version: int = FORMAT_VERSION

    def entry(self, name: str, split: Split) -> CorpusEntry:
        """Errors: ConfigError with the names there are."""
        for corpus in self.corpora:
            if corpus.name == name and corpus.split == split:
                return corpus
        known = ", ".join(sorted({f"{c.name} ({c.split})" for c in self.corpora}))
        raise ConfigError(f"no corpus {name} ({split}) in the data folder; it has {known}")


@dataclass(frozen=True, slots=True)
class Document:
    """Ids of one document, and whether each counts as a target (None: all do)."""

    ids: Sequence[int]
    weights: Sequence[int] | None = None


@dataclass(frozen=True)
class Corpus:
    """The opened files of one entry."""

    entry: CorpusEntry
    tokens: NDArray[Any]
    offsets: NDArray[np.uint64]
    weights: NDArray[np.uint8] | None = field(default=None)

    def length(self, document: int) -> int:
        """Tokens of a document."""
        return int(self.offsets[document + 1] - self.offsets[document])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every document."""
        offsets = self.offsets.astype(np.int64)
        return offsets[1:] - offsets[:-1]


def write_corpus(
    folder: Path,
    name: str,
    split: Split,
    documents: Iterable[Document],
    *,
    vocab_size: int,
    is_divisible: bool,
    sources: Sequence[Source] = (),
) -> CorpusEntry:
    """Write the files of one corpus; documents of fewer than two tokens are left out. Returns its manifest entry."""
    dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
    paths = _paths(folder, name, split)
    digest, offsets, has_weights = hashlib.sha256(), [0], False
    with paths["tokens"].open("wb") as token_file, paths["weights"].open("wb") as weight_file:
        for document in documents:
            if len(document.ids) < 2:
                continue
            if max(document.ids) >= vocab_size or min(document.ids) < 0:
                raise ConfigError(f"corpus {name} has an id outside the vocabulary of {vocab_size}")
            ids = np.asarray(document.ids, dtype=dtype).astype(f"<{np.dtype(dtype).str[1:]}").tobytes()
            weights = np.ones(len(document.ids), np.uint8)
            if document.weights is not None:
                weights, has_weights = np.asarray(document.weights, np.uint8), True
            digest.update(ids + weights.tobytes())
            token_file.write(ids)
            weight_file.write(weights.tobytes())
            offsets.append(offsets[-1] + len(document.ids))
    if not has_weights:
        paths["weights"].unlink()
    paths["index"].write_bytes(np.asarray(offsets, dtype="<u8").tobytes())
    return CorpusEntry(
        name=name,
        split=split,
        documents=len(offsets) - 1,
        tokens=offsets[-1],
        dtype=dtype,
        has_weights=has_weights,
        is_divisible=is_divisible,
        sha256=digest.hexdigest(),
        sources=tuple(sources),
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file written: a folder without it is not finished."""
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Errors: ConfigError where there is none, or one of another version."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist; write the corpora first (scripts/data/, see the recipe's data.builder)"
        )
    data = json.loads(path.read_text())
    if data.get("version") != FORMAT_VERSION:
        raise ConfigError(f"{path} has version {data.get('version')}, this code reads {FORMAT_VERSION}; build it again")
    return build(Manifest, data)


def open_corpus(folder: Path, entry: CorpusEntry) -> Corpus:
    """Map the files of an entry. Errors: ConfigError where sizes disagree with the manifest."""
    paths = _paths(folder, entry.name, entry.split)
    width = 2 if entry.dtype == "uint16" else 4
    sizes = {"tokens": entry.tokens * width, "index": (entry.documents + 1) * 8}
    if entry.has_weights:
        sizes["weights"] = entry.tokens
    for kind, size in sizes.items():
        found = paths[kind].stat().st_size if paths[kind].is_file() else -1
        if found != size:
            raise ConfigError(f"{paths[kind]} has {found} bytes, the manifest says {size}; build the data folder again")
    if entry.documents == 0:
        raise ConfigError(f"corpus {entry.name} ({entry.split}) has no documents")
    return Corpus(
        entry,
        np.memmap(paths["tokens"], dtype=f"<u{width}", mode="r"),
        np.fromfile(paths["index"], dtype="<u8"),
        np.memmap(paths["weights"], dtype=np.uint8, mode="r") if entry.has_weights else None,
    )


def _paths(folder: Path, name: str, split: str) -> dict[str, Path]:
    return {kind: folder / f"{name}.{split}.{kind}.bin" for kind in ("tokens", "index", "weights")}
