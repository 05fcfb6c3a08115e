"""Pictures in: sizes, padding, transparency, patches; and pictures that are none."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from baltoro.chat.media import PictureConfig, expand_pads, load_image, preprocess, resized
from baltoro.errors import RequestError


def png(image: Image.Image, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, form)
    return out.getvalue()


def test_patches_run_row_by_row_and_put_together_give_the_picture() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (28 * 2, 28 * 3, 3), dtype=np.uint8)
    out = preprocess(Image.fromarray(pixels))
    assert out.grid == (1, 4, 6)
    assert out.pixels.shape == (24, 3, 14, 14)
    assert out.pixels.dtype == np.float32
    assert out.num_tokens == 6
    again = out.pixels.reshape(4, 6, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(56, 84, 3)
    np.testing.assert_array_equal(np.rint((again + 1) * 127.5).astype(np.uint8), pixels)
    assert out.pixels[0, :, 0, 1].tolist() == [float(np.float32(v) / np.float32(255) * 2 - 1) for v in pixels[0, 1]]


def test_padding_is_black_at_the_right_and_the_bottom() -> None:
    out = preprocess(Image.new("RGB", (15, 29), (255, 255, 255)))
    assert out.grid == (1, 4, 2)
    assert out.num_tokens == 2
    picture = out.pixels.reshape(4, 2, 3, 14, 14).transpose(2, 0, 3, 1, 4).reshape(3, 56, 28)
    assert (picture[:, :29, :15] == 1).all()
    assert (picture[:, 29:, :] == -1).all()
    assert (picture[:, :, 15:] == -1).all()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1, 1), (1, 1)),
        ((28, 28), (28, 28)),
        ((3584, 3584), (3584, 3584)),  # 256 x 256 patches: exactly the limit
        ((7168, 7168), (3584, 3584)),
        ((14_336, 100), (7168, 50)),
        ((71_680, 1), (7168, 1)),
        ((4000, 6000), (2931, 4397)),
    ],
)
def test_pictures_are_shrunk_to_the_limits_and_never_enlarged(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert resized(*size, PictureConfig()) == expected


def test_small_configs_work_alike() -> None:
    config = PictureConfig(patch_size=4, merge=3, in_patch_limit=36, side_limit=12)
    out = preprocess(Image.new("RGB", (100, 40)), config)
    assert out.grid[1] % 3 == out.grid[2] % 3 == 0
    assert out.num_tokens == out.grid[1] * out.grid[2] // 9
    assert max(out.grid) <= 12
    assert out.pixels.shape[1:] == (3, 4, 4)


def test_transparency_shows_a_chessboard_that_starts_white() -> None:
    out = preprocess(Image.new("RGBA", (28, 28), (10, 20, 30, 0)))
    picture = np.rint((out.pixels.reshape(2, 2, 3, 14, 14).transpose(2, 0, 3, 1, 4).reshape(3, 28, 28) + 1) * 127.5)
    assert picture[0, 0, 0] == picture[1, 7, 7] == 255
    assert picture[0, 0, 8] == picture[0, 8, 0] == picture[2, 15, 7] == 180
    assert picture[0, 8, 8] == 255


def test_half_transparent_pixels_are_mixed_and_cut_to_whole_numbers() -> None:
    out = preprocess(Image.new("RGBA", (28, 28), (10, 20, 30, 100)))
    expected = [int(v * 100 / 255 + 255 * 155 / 255) for v in (10, 20, 30)]
    assert np.rint((out.pixels[0, :, 0, 0] + 1) * 127.5).tolist() == expected


def test_palettes_gray_and_other_modes_become_rgb() -> None:
    gray = Image.new("L", (28, 28), 255)
    assert (preprocess(gray).pixels == 1).all()
    for mode in ("P", "1", "CMYK", "LA", "I;16"):
        assert preprocess(gray.convert(mode)).pixels.shape == (4, 3, 14, 14)
    hidden = Image.new("L", (28, 28), 0)
    hidden.info["transparency"] = 0
    assert (preprocess(hidden).pixels[0, :, 0, 0] == 1).all()
    palette = Image.new("P", (28, 28), 0)
    palette.info["transparency"] = 0
    assert (preprocess(palette).pixels[0, :, 0, 0] == 1).all()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_the_usual_formats_decode_from_bytes_and_data_urls(form: str) -> None:
    data = png(Image.new("RGB", (6, 4), (255, 255, 255)), form)
    url = f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"
    assert load_image(data).size == load_image(url).size == (6, 4)
    assert (np.asarray(load_image(url).convert("RGB")) > 250).all()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.org/a.png", "data URL"),
        ("data:image/png,abc", "data URL"),
        ("data:image/png;base64,@@@", "base64"),
        ("data:image/png;base64,aGVsbG8=", "not a PNG"),
        (b"", "not a PNG"),
        (b"P6 1 1 255 abc", "not a PNG"),
        (png(Image.effect_noise((64, 64), 9))[:-900], "cannot be decoded"),
        (png(Image.new("RGB", (64, 64)), "JPEG")[:200], "cannot be decoded|not a PNG"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(source: str | bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        load_image(source, param="messages[0].content[1]")
    assert caught.value.param == "messages[0].content[1]"


def test_decompression_bombs_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(RequestError, match="at most 1000"):
        load_image(png(Image.new("1", (50, 50))), max_pixels=1000)
    huge = bytearray(png(Image.new("1", (8, 8))))
    huge[16:24] = (60_000).to_bytes(4, "big") * 2  # width and height of the header, which then lies
    with pytest.raises(RequestError):
        load_image(bytes(huge))


def test_each_pad_becomes_as_many_as_the_picture_has_tokens() -> None:
    assert expand_pads([1, 9, 2, 9, 3], 9, [3, 1]) == [1, 9, 9, 9, 2, 9, 3]
    assert expand_pads([1, 2], 9, []) == [1, 2]
    for counts in ([1], [1, 1, 1]):
        with pytest.raises(RequestError, match="2 media pads"):
            expand_pads([9, 0, 9], 9, counts)
