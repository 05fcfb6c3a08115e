"""One small file to carry the data folder to a machine without these packages, and the way back.

    python -m scripts.data.tiny.carry pack data/tiny data/tiny.carry
    python -m scripts.data.tiny.carry unpack data/tiny.carry data/tiny

In: a data folder. Out: a tar of xz members: ids, document lengths, weights as runs, recipes and ink of the pictures.
Unpacking needs the standard library and numpy, and draws the pictures anew. Ids, weights and manifest come back byte
for byte; a pixel may differ by rounding.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # also without an installed baltoro

from baltoro.config import build
from baltoro.trainer.corpus import MANIFEST, CorpusEntry, Manifest, read_manifest
from baltoro.trainer.pictures import write_pictures
from scripts.data.tiny.draw import Ink, draw, unpack_recipes

AS_IT_IS = (MANIFEST, "tiktoken.model", "tokenizer_config.json", "ink.npz")
DRAWN_AT_ONCE = 2000
# Ids are pairs of bytes: with lp and pb the coder tells low bytes from high ones.
_PAIRS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 26, "lc": 3, "lp": 1, "pb": 1}]


def pack(folder: Path, target: Path) -> None:
    """Write `target`. Errors: ConfigError where the folder is not finished."""
    with tarfile.open(target, "w") as tar:
        for name in AS_IT_IS:
            _add(tar, name, (folder / name).read_bytes())
        for entry in read_manifest(folder).corpora:
            stem = f"{entry.name}.{entry.split}"
            _add(tar, f"{stem}.tokens", (folder / f"{stem}.tokens.bin").read_bytes())
            lengths = np.diff(np.fromfile(folder / f"{stem}.index.bin", "<u8")).astype("<u4")
            _add(tar, f"{stem}.lengths", lengths.tobytes())
            if entry.has_weights:
                weights = np.fromfile(folder / f"{stem}.weights.bin", np.uint8)
                _add(tar, f"{stem}.runs", _to_runs(weights).astype("<u2").tobytes())
            if (recipes := folder / f"{stem}.recipes.npy").is_file():
                _add(tar, f"{stem}.recipes", recipes.read_bytes())
                shown = np.diff(np.fromfile(folder / f"{stem}.pictures.index.bin", "<u8"))
                _add(tar, f"{stem}.shown", shown.astype(np.uint8).tobytes())


def unpack(source: Path, folder: Path) -> None:
    """Write the data folder, corpora beside each other; the manifest last, as a sign that it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in AS_IT_IS:
        if name != MANIFEST:
            (folder / name).write_bytes(_member(source, name))
    manifest = _member(source, MANIFEST)
    entries = build(Manifest, json.loads(manifest)).corpora
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        # pictures take longest to draw, so they come first
        pictures = [entry for entry in entries if _has(source, f"{entry.name}.{entry.split}.recipes")]
        drawn = [(entry, _start_drawing(pool, source, folder, entry)) for entry in pictures]
        written = [pool.submit(_unpack_corpus, source, folder, entry) for entry in entries]
        for entry, parts in drawn:
            pixels = np.concatenate([part.result() for part in parts])
            shown = _member(source, f"{entry.name}.{entry.split}.shown")
            write_pictures(folder, entry.name, entry.split, pixels, list(shown))
        for one in written:
            one.result()
    (folder / MANIFEST).write_bytes(manifest)


def _unpack_corpus(source: Path, folder: Path, entry: CorpusEntry) -> None:
    stem = f"{entry.name}.{entry.split}"
    (folder / f"{stem}.tokens.bin").write_bytes(_member(source, f"{stem}.tokens"))
    lengths = np.frombuffer(_member(source, f"{stem}.lengths"), "<u4")
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.uint64)])
    (folder / f"{stem}.index.bin").write_bytes(offsets.astype("<u8").tobytes())
    if entry.has_weights:
        weights = _from_runs(np.frombuffer(_member(source, f"{stem}.runs"), "<u2"))
        (folder / f"{stem}.weights.bin").write_bytes(weights.tobytes())


def _start_drawing(
    pool: ProcessPoolExecutor, source: Path, folder: Path, entry: CorpusEntry
) -> list[Future[NDArray[np.uint8]]]:
    """Pictures of one corpus in pieces; their recipes are written beside."""
    stem = f"{entry.name}.{entry.split}"
    recipes = _member(source, f"{stem}.recipes")
    (folder / f"{stem}.recipes.npy").write_bytes(recipes)
    count = len(np.load(io.BytesIO(recipes)))
    firsts = range(0, count, DRAWN_AT_ONCE)
    return [pool.submit(_draw, folder, stem, first, first + DRAWN_AT_ONCE) for first in firsts]


def _draw(folder: Path, stem: str, first: int, last: int) -> NDArray[np.uint8]:
    ink = Ink.load(folder / "ink.npz")
    recipes = np.load(folder / f"{stem}.recipes.npy")[first:last]
    return np.stack([draw(picture, ink) for picture in unpack_recipes(recipes)])


def _to_runs(weights: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Lengths of runs of 0, 1, 0, ...; the first may be empty. Runs are shorter than 2**16: dialogues are short."""
    borders = np.flatnonzero(np.diff(weights.astype(np.int8))) + 1
    edges = np.concatenate([[0] if weights[0] == 0 else [0, 0], borders, [len(weights)]])
    runs = np.diff(edges)
    if runs.max() >= 1 << 16:
        raise ValueError(f"a run of {runs.max()} equal weights does not fit into 16 bits")
    return runs


def _from_runs(runs: NDArray[np.uint16]) -> NDArray[np.uint8]:
    return np.repeat(np.arange(len(runs)) % 2, runs).astype(np.uint8)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    packed = lzma.compress(data, filters=_PAIRS)
    info = tarfile.TarInfo(name)
    info.size = len(packed)
    tar.addfile(info, io.BytesIO(packed))


def _member(source: Path, name: str) -> bytes:
    with tarfile.open(source) as tar:
        file = tar.extractfile(name)
        return lzma.decompress(file.read()) if file is not None else b""


def _has(source: Path, name: str) -> bool:
    with tarfile.open(source) as tar:
        return name in tar.getnames()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("pack", "unpack"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args(argv)
    (pack if args.verb == "pack" else unpack)(args.source, args.target)
    if args.verb == "pack":
        print(f"{args.target}: {args.target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
