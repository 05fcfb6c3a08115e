"""Pictures: from bytes or data URLs to the patches that the vision tower reads, and room for them in the ids.

In: PNG, JPEG, WebP, GIF (first frame) or BMP. Out: float32 patches, their grid, and how many ids they stand for.
Invariants: pictures are never enlarged; padding is black, at the right and the bottom; patches run row by row.
Limits: pictures only, no video; nothing is fetched; orientation tags are ignored, as K3's own processor does.
Source: K3's `media_proc_cfg` and its vision preprocessing.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from baltoro.errors import RequestError

# Pillow warns about bombs from here on. Decoded as RGBA this is 358 MB; K3 itself keeps at most 51 million pixels.
MAX_PIXELS = 89_478_485
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_SQUARE = 8  # of the chessboard that shows through transparent pixels
_WHITE, _GRAY = 255, 180


@dataclass(frozen=True, slots=True)
class PictureConfig:
    """K3's preprocessing. `in_patch_limit` bounds the patches of one picture, `side_limit` those along one side."""

    patch_size: int = 14
    merge: int = 2
    in_patch_limit: int = 65_536
    side_limit: int = 512


@dataclass(frozen=True, slots=True)
class Patches:
    """One picture, ready for the tower: `pixels` float32 [t*h*w, 3, patch, patch] in [-1, 1], `grid` = (t, h, w)."""

    pixels: NDArray[np.float32]
    grid: tuple[int, int, int]
    num_tokens: int


def load_image(source: str | bytes | Image.Image, *, param: str = "image", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode a data URL or the bytes of a picture; a PIL image passes through.

    Errors: RequestError with `param` for what cannot be decoded, is no picture, or has more than `max_pixels`.
    """
    if isinstance(source, Image.Image):
        return source
    data = _data_url(source, param) if isinstance(source, str) else source
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > max_pixels:
            raise RequestError(
                f"{param}: the picture has {image.width} x {image.height} pixels; send at most {max_pixels}.",
                param=param,
            )
        image.load()
    except UnidentifiedImageError as error:
        raise RequestError(f"{param}: not a {', '.join(_FORMATS)} picture.", param=param) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RequestError(f"{param}: the picture cannot be decoded ({error}); send it again.", param=param) from error
    return image


def preprocess(image: Image.Image, config: PictureConfig | None = None) -> Patches:
    """Resize, put on a chessboard where transparent, pad, scale to [-1, 1] and cut into patches."""
    config = config or PictureConfig()
    patch, cell = config.patch_size, config.patch_size * config.merge
    width, height = resized(image.width, image.height, config)
    if image.mode == "P":
        image = image.convert("RGBA")
    pixels = _opaque(image.resize((width, height), Image.Resampling.BICUBIC))
    pixels = np.pad(pixels, ((0, -height % cell), (0, -width % cell), (0, 0)))
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    scaled = (pixels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    cut = scaled.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return Patches(
        pixels=np.ascontiguousarray(cut.reshape(-1, 3, patch, patch)),
        grid=(1, rows, columns),
        num_tokens=rows * columns // config.merge**2,
    )


def resized(width: int, height: int, config: PictureConfig) -> tuple[int, int]:
    """Width and height after the resize, before padding."""
    side = config.side_limit * config.patch_size
    num_patches = max(1, width // config.patch_size) * max(1, height // config.patch_size)
    scale = min(1.0, math.sqrt(config.in_patch_limit / num_patches), side / width, side / height)
    return min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side)


def expand_pads(ids: Sequence[int], pad_id: int, num_tokens: Sequence[int]) -> list[int]:
    """Replace the n-th media pad of `ids` by num_tokens[n] pads.

    Errors: RequestError if there are more or fewer pads than pictures.
    """
    places = [i for i, token in enumerate(ids) if token == pad_id]
    if len(places) != len(num_tokens):
        raise RequestError(
            f"The prompt has {len(places)} media pads for {len(num_tokens)} pictures; give one picture for each.",
            param="messages",
        )
    out: list[int] = []
    done = 0
    for place, count in zip(places, num_tokens, strict=True):
        out += ids[done:place]
        out += [pad_id] * count
        done = place + 1
    return out + list(ids[done:])


def _data_url(url: str, param: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise RequestError(
            f"{param}: send the picture as a data URL (data:image/png;base64,...); addresses are not fetched.",
            param=param,
        )
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{param}: the data URL is not valid base64 ({error}).", param=param) from error


def _opaque(image: Image.Image) -> NDArray[np.uint8]:
    """RGB [height, width, 3]; what is transparent shows a chessboard, mixed in float32 and cut to whole numbers."""
    has_alpha = "A" in image.getbands() or "transparency" in image.info
    if image.mode == "RGB" or not has_alpha:
        return np.asarray(image.convert("RGB"))
    pixels = np.asarray(image.convert("RGBA"))
    y, x = np.indices(pixels.shape[:2]) // _SQUARE
    board = np.where((x + y) % 2 == 1, _GRAY, _WHITE).astype(np.uint8)[:, :, None]
    alpha = pixels[:, :, 3:].astype(np.float32) / np.float32(255)
    mixed: NDArray[np.float32] = alpha * pixels[:, :, :3] + (1 - alpha) * board
    return mixed.astype(np.uint8)
