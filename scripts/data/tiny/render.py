"""Dialogues and texts -> ids, with the weight of each: 1 for what the model is to say, 0 for the rest.

In: dialogues, a tokenizer. Out: documents of `trainer.corpus`, or plain pieces of text to learn a vocabulary from.
Invariants: ids are those that a server would feed the model at each of its turns, and sample from it; media pads are
already as many as the picture has features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

from PIL import Image

from baltoro.chat.media import expand_pads
from baltoro.chat.messages import normalise
from baltoro.chat.segments import Segment
from baltoro.chat.tokenizer import EOS, MEDIA_PAD, Tokenizer
from baltoro.chat.xtml import Options, completion_segments, segments
from baltoro.trainer.corpus import Document
from scripts.data.tiny.draw import Picture
from scripts.data.tiny.exchange import Dialogue, Json

CELL = 28  # pixels along a side of what becomes one feature


def runs(dialogue: Dialogue) -> Iterator[tuple[list[Segment], int]]:
    """Segments in order, each run with its weight."""
    messages = normalise(_with_pictures(dialogue))
    options = Options(
        tools=list(dialogue.tools) or None,
        thinking=dialogue.thinking,
        effort=dialogue.effort,
        response_format=dialogue.response_format,
        tool_choice=dialogue.tool_choice,
    )
    last, done = len(messages) - 1, 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or (index < last and dialogue.learns == "last"):
            continue
        prompt = segments(messages[:index], options)
        answer = completion_segments(message, thinking=dialogue.thinking)
        yield prompt[done:], 0
        yield answer, 1
        done = len(prompt) + len(answer)


def document(dialogue: Dialogue, tokenizer: Tokenizer) -> Document:
    """Ids and weights of a dialogue. Response formats are one-shot, so such a dialogue must have one answer."""
    ids: list[int] = []
    weights: list[int] = []
    counts = [num_features(p) for p in dialogue.pictures]
    pad, used, encode = tokenizer.special(MEDIA_PAD), 0, _encoder(tokenizer)
    for run, weight in runs(dialogue):
        found = [i for text, allow in run for i in encode(text, allow)]
        if num_pads := found.count(pad):
            found = expand_pads(found, pad, counts[used : used + num_pads])
            used += num_pads
        ids += found
        weights += [weight] * len(found)
    return Document(ids, weights)


def text_document(text: str, tokenizer: Tokenizer) -> Document:
    """Ids of a text, closed by [EOS]; all count."""
    return Document([*tokenizer.encode(text), tokenizer.special(EOS)])


def words(dialogue: Dialogue) -> Iterator[tuple[str, int]]:
    """What of a dialogue is tokenised, piece by piece, and whether the model says it."""
    for run, weight in runs(dialogue):
        for text, is_control in run:
            if not is_control:
                yield text, weight


def num_features(picture: Picture) -> int:
    return (picture.height // CELL) * (picture.width // CELL)


@cache
def _encoder(tokenizer: Tokenizer) -> Callable[[str, bool], tuple[int, ...]]:
    """`encode` with a memory: most segments of a dialogue are the protocol's own."""
    return lru_cache(maxsize=1 << 16)(lambda text, allow: tuple(tokenizer.encode(text, allow_special=allow)))


@cache
def _blank(width: int, height: int) -> Image.Image:
    return Image.new("L", (width, height))


def _with_pictures(dialogue: Dialogue) -> list[Json]:
    """Placeholders of pictures become pictures of the right size: only the size shows in the prompt."""
    left = iter(dialogue.pictures)

    def part(found: Json) -> Json:
        if found["type"] != "picture":
            return found
        picture = next(left)
        return {"type": "image", "image": _blank(picture.width, picture.height)}

    def content(found: Any) -> Any:
        return [part(p) for p in found] if isinstance(found, list) else found

    return [{**m, "content": content(m["content"])} for m in dialogue.messages]


def longest(documents: Sequence[Document]) -> int:
    return max((len(d.ids) for d in documents), default=0)
