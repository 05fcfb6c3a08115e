"""The ink that `draw.py` draws with: scikit-learn's handwritten digits, and letters of matplotlib's own fonts.

In: both packages. Out: Ink, the label of each digit, and where they came from.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baltoro.trainer.corpus import Source
from scripts.data.tiny.draw import LETTERS, Ink

FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "cmr10", "cmss10", "cmtt10",
)  # fmt: skip
GLYPH_HEIGHT, GLYPH_WIDTH, POINTS = 28, 28, 24


def load_ink() -> tuple[Ink, NDArray[np.int64], list[Source]]:
    """(ink, label of each digit, sources)."""
    import matplotlib
    from sklearn.datasets import load_digits

    found = load_digits()
    digits = np.asarray(found.images, np.uint8)
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    sets = [_glyphs(folder / f"{name}.ttf") for name in FONTS]
    ink = Ink(digits, np.stack([g for g, _ in sets]), np.stack([a for _, a in sets]))
    sources = [
        _source("scikit-learn (load_digits: UCI optical digits, CC-BY-4.0)", "scikit-learn", "BSD-3-Clause", digits),
        _source(
            "matplotlib (DejaVu, STIX, Computer Modern fonts)", "matplotlib", "Bitstream-Vera, OFL, BSD", ink.glyphs
        ),
    ]
    return ink, np.asarray(found.target, np.int64), sources


def _source(label: str, package: str, licence: str, data: NDArray[np.uint8]) -> Source:
    digest = hashlib.sha256(data.tobytes()).hexdigest()
    return Source(package=label, version=version(package), licence=licence, sha256=digest, documents=len(data))


def _glyphs(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(glyphs [letters, GLYPH_HEIGHT, GLYPH_WIDTH], advance of each)."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(str(path), POINTS)
    glyphs = np.zeros((len(LETTERS), GLYPH_HEIGHT, GLYPH_WIDTH), np.uint8)
    advances = np.zeros(len(LETTERS), np.uint8)
    for i, letter in enumerate(LETTERS):
        page = Image.new("L", (GLYPH_WIDTH, GLYPH_HEIGHT))
        # The baseline at 22 of 28 rows leaves room for the tails of g and y.
        ImageDraw.Draw(page).text((1, 22), letter, font=font, fill=255, anchor="ls")
        glyphs[i] = np.asarray(page)
        advances[i] = min(GLYPH_WIDTH, round(font.getlength(letter)) + 2)
    return glyphs, advances
