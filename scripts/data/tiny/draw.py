"""Pictures from recipes: handwritten digits and short printed texts, moved, turned, inverted and made noisy.

In: a recipe of a few numbers, and the ink of digits and glyphs. Out: grey pictures, uint8 [height, width].
Why recipes: a picture of 3,136 bytes is stored in 40; the machine that trains draws them all in seconds.
Needs numpy alone. The same recipe gives the same picture up to the rounding of the sine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
HANDWRITTEN = -1  # as a font: `text` is the index of one of scikit-learn's digits

RECIPE = np.dtype(
    [
        ("text", "S8"), ("font", "i2"), ("height", "u2"), ("width", "u2"), ("size", "f4"), ("angle", "f4"),
        ("right", "f4"), ("down", "f4"), ("ink", "u1"), ("paper", "u1"), ("noise", "u1"), ("seed", "u4"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Picture:
    """A recipe. size: height of the ink as a share of the picture's; angle in degrees; right, down: shift as share."""

    text: str
    font: int
    height: int
    width: int
    size: float
    angle: float
    right: float
    down: float
    ink: int
    paper: int
    noise: int
    seed: int


@dataclass(frozen=True)
class Ink:
    """What can be drawn: digits uint8 [N, 8, 8] in 0..16, glyphs uint8 [fonts, letters, h, w], advances in pixels."""

    digits: NDArray[np.uint8]
    glyphs: NDArray[np.uint8]
    advances: NDArray[np.uint8]

    def save(self, path: Path) -> None:
        np.savez(path, digits=self.digits, glyphs=self.glyphs, advances=self.advances)

    @staticmethod
    def load(path: Path) -> Ink:
        with np.load(path) as file:
            return Ink(file["digits"], file["glyphs"], file["advances"])


def draw(picture: Picture, ink: Ink) -> NDArray[np.uint8]:
    """The picture, uint8 [height, width]."""
    stencil = _stencil(picture, ink)
    scale = picture.size * picture.height / stencil.shape[0]  # pixels of the picture per pixel of the stencil
    turn = np.deg2rad(picture.angle)
    down, right = np.indices((picture.height, picture.width), dtype=np.float64)
    down -= picture.height * (0.5 + picture.down) - 0.5
    right -= picture.width * (0.5 + picture.right) - 0.5
    y = (np.cos(turn) * down - np.sin(turn) * right) / scale + (stencil.shape[0] - 1) / 2
    x = (np.sin(turn) * down + np.cos(turn) * right) / scale + (stencil.shape[1] - 1) / 2
    cover = _sample(stencil, y, x)
    grey = picture.paper + (picture.ink - picture.paper) * cover
    noise = np.random.default_rng(picture.seed).integers(-128, 128, grey.shape) * (picture.noise / 128)
    return np.asarray(np.clip(np.rint(grey + noise), 0, 255), np.uint8)


def pack_recipes(pictures: Sequence[Picture]) -> NDArray[np.void]:
    """One row of RECIPE for each."""
    rows = [
        tuple(getattr(p, n).encode() if n == "text" else getattr(p, n) for n in RECIPE.names or ()) for p in pictures
    ]
    return np.array(rows, dtype=RECIPE)


def unpack_recipes(rows: NDArray[np.void]) -> list[Picture]:
    """The way back; floats come back in single precision."""
    return [Picture(row[0].decode(), *row.tolist()[1:]) for row in rows]


def rounded(value: float) -> float:
    """A float as a recipe stores it."""
    return float(np.float32(value))


def _stencil(picture: Picture, ink: Ink) -> NDArray[np.float64]:
    """Cover 0..1 of the untouched digit or text."""
    if picture.font == HANDWRITTEN:
        return np.asarray(ink.digits[int(picture.text)], np.float64) / 16
    columns = []
    for letter in picture.text:
        place = LETTERS.index(letter)
        columns.append(ink.glyphs[picture.font, place][:, : ink.advances[picture.font, place]])
    return np.concatenate(columns, axis=1) / 255


def _sample(stencil: NDArray[np.float64], y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bilinear, nothing outside."""
    padded = np.pad(stencil, 1)
    y = np.clip(y + 1, 0, padded.shape[0] - 1.001)
    x = np.clip(x + 1, 0, padded.shape[1] - 1.001)
    top, left = y.astype(np.int64), x.astype(np.int64)
    v, u = y - top, x - left
    upper = (1 - u) * padded[top, left] + u * padded[top, left + 1]
    lower = (1 - u) * padded[top + 1, left] + u * padded[top + 1, left + 1]
    mixed: NDArray[np.float64] = (1 - v) * upper + v * lower
    return mixed
