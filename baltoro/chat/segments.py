"""The pieces that a prompt is made of: text that is tokenised by itself, and who may write control tokens.

In: calls that name tags, attributes, text and pictures. Out: segments in order, and the pictures of their pads.
Invariants: only `control` is allow-special; an attribute is four segments; empty segments are dropped.
Source: K3's `encoding_k3`: the cuts between segments decide the ids, so they are part of the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from PIL import Image

from baltoro.chat.media import load_image
from baltoro.chat.messages import Json
from baltoro.chat.tokenizer import (
    CLOSE,
    END_OF_MSG,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    OPEN,
    SEP,
    Tokenizer,
)
from baltoro.errors import RequestError

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"


class Segment(NamedTuple):
    """A piece of the prompt that is tokenised by itself."""

    text: str
    allow_special: bool


def escape(value: str) -> str:
    """An attribute value as it stands between its quotes."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


class Writer:
    """Collects the segments and pictures of one prompt. Single writer: the call that made it."""

    def __init__(self, images: Sequence[Image.Image]) -> None:
        self.segments: list[Segment] = []
        self.pictures: list[Image.Image] = []
        self._images = images
        self._num_used = 0

    def control(self, text: str) -> None:
        self.segments.append(Segment(text, True))

    def text(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, False))

    def open(self, tag: str, **attributes: str) -> None:
        self.control(OPEN)
        self.text(tag)
        for key, value in attributes.items():
            self.text(f" {key}")
            self.text('="')
            self.text(escape(value))
            self.text('"')
        self.control(SEP)

    def close(self, tag: str) -> None:
        self.control(CLOSE)
        self.text(tag)
        self.control(SEP)

    def end_message(self) -> None:
        self.close("message")
        self.control(END_OF_MSG)

    def option(self, kind: str, body: str) -> None:
        """A system message that the user did not write."""
        self.open("message", role="system", type=kind)
        self.text(body)
        self.end_message()

    def content(self, content: str | Sequence[Json], param: str) -> None:
        """Text, or text and pictures."""
        if isinstance(content, str):
            self.string(content)
            return
        for j, part in enumerate(content):
            if part["type"] == "text":
                self.string(part["text"])
            else:
                self.picture(load_image(part["image"], param=f"{param}[{j}]"))

    def string(self, text: str) -> None:
        """Text in which placeholders stand for pictures, if pictures were given for them."""
        if not self._images:
            self.text(text)
            return
        first, *rest = text.split(IMAGE_PLACEHOLDER)
        self.text(first)
        for piece in rest:
            if self._num_used < len(self._images):
                self.picture(self._images[self._num_used])
            self._num_used += 1
            self.text(piece)

    def picture(self, image: Image.Image) -> None:
        self.pictures.append(image)
        size = f"image {image.width}x{image.height}"
        self.control(f"{MEDIA_BEGIN}{size}{MEDIA_CONTENT}{MEDIA_PAD}{MEDIA_END}")

    def finish(self) -> None:
        """Errors: RequestError if placeholders and the pictures given for them do not pair up."""
        if self._images and self._num_used != len(self._images):
            raise RequestError(
                f"{self._num_used} image placeholders for {len(self._images)} images; give one for each.",
                param="messages",
            )


def encode_segments(parts: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Ids of segments, each tokenised by itself."""
    return [i for text, allow in parts for i in tokenizer.encode(text, allow_special=allow)]
