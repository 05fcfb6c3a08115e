"""Pictures of a corpus on disk, and as the patches that the vision tower reads. No torch.

In: grey pictures, all of one size, in the order of their places in the documents. Out: two files beside the tokens,
    NAME.SPLIT.pictures.npy         uint8 [count, height, width]
    NAME.SPLIT.pictures.index.bin   uint64 little-endian, documents + 1 offsets into it
and, read back, patches like those of `chat.media.preprocess`. In the ids, a picture's features stand where its media
pads stand: picture after picture, cell by cell.
Limits: grey, one size per corpus, height and width multiples of patch * merge; so nothing is resized or padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baltoro.errors import ConfigError
from baltoro.trainer.corpus import Split


@dataclass(frozen=True)
class Pictures:
    """`pixels` uint8 [count, height, width], memory-mapped; `offsets` [documents + 1]: where each document's begin."""

    pixels: NDArray[np.uint8]
    offsets: NDArray[np.uint64]

    def of(self, document: int) -> NDArray[np.uint8]:
        """Pictures of one document, uint8 [n, height, width]."""
        found: NDArray[np.uint8] = self.pixels[int(self.offsets[document]) : int(self.offsets[document + 1])]
        return found


def write_pictures(folder: Path, name: str, split: Split, pixels: NDArray[np.uint8], counts: Sequence[int]) -> None:
    """`counts`: pictures of each document. Errors: ConfigError where they do not add up to the pictures."""
    if sum(counts) != len(pixels):
        raise ConfigError(f"corpus {name} has {len(pixels)} pictures, its documents count {sum(counts)}")
    array, index = _paths(folder, name, split)
    np.save(array, pixels)
    index.write_bytes(np.concatenate([[0], np.cumsum(counts)]).astype("<u8").tobytes())


def open_pictures(folder: Path, name: str, split: Split) -> Pictures | None:
    """The pictures of a corpus; None if it has none. Errors: ConfigError where index and pictures disagree."""
    array, index = _paths(folder, name, split)
    if not array.is_file():
        return None
    pixels, offsets = np.load(array, mmap_mode="r"), np.fromfile(index, dtype="<u8")
    if int(offsets[-1]) != len(pixels):
        raise ConfigError(f"{index} counts {offsets[-1]} pictures, {array} has {len(pixels)}; build the folder again")
    return Pictures(pixels, offsets)


def patches(
    pixels: NDArray[np.uint8], *, patch: int = 14
) -> tuple[NDArray[np.float32], tuple[tuple[int, int, int], ...]]:
    """(float32 [sum t*h*w, 3, patch, patch] in [-1, 1], grids) of grey pictures [n, height, width]."""
    count, height, width = pixels.shape
    rows, columns = height // patch, width // patch
    if rows * patch != height or columns * patch != width:
        raise ConfigError(f"pictures of {height} x {width} do not cut into patches of {patch}")
    scaled = (pixels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    cut = scaled.reshape(count, rows, patch, columns, patch).transpose(0, 1, 3, 2, 4).reshape(-1, 1, patch, patch)
    return np.ascontiguousarray(np.broadcast_to(cut, (len(cut), 3, patch, patch))), ((1, rows, columns),) * count


def _paths(folder: Path, name: str, split: str) -> tuple[Path, Path]:
    return folder / f"{name}.{split}.pictures.npy", folder / f"{name}.{split}.pictures.index.bin"
