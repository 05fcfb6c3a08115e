"""Questions about pictures: which digit is this, what does this say.

In: labels of scikit-learn's digits. Out: exchanges with a picture. A fifth of the digits (by index) and a tenth of the
printed texts are held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from scripts.data.tiny.draw import HANDWRITTEN, Picture, rounded
from scripts.data.tiny.exchange import Exchange, Split, is_held_out, is_mine
from scripts.data.tiny.ink import FONTS

SIDE = 56  # two by two tokens
WIDE = 112  # two by four tokens
LONGEST = 6  # letters of a printed text
DIGIT_SHARE = 0.2
ASK_DIGIT = (
    "Which digit is this?", "What digit is this?", "What number is this?", "What digit do you see?",
    "Which number is it?", "What is in the picture?", "Read the digit.", "Which digit is shown in the image?",
    "What digit is shown?", "Tell me the digit in this picture.", "Answer with the digit that the image shows.",
    "Name the digit.", "What is written here?", "Can you read this digit?",
)  # fmt: skip
ASK_TEXT = (
    "What does this say?", "What is written here?", "Read the text.", "What text is in the picture?", "Read this.",
    "What does the image say?", "Which letters do you see?", "Transcribe the picture.", "What is in the picture?",
)  # fmt: skip


def digits(labels: Sequence[int], rng: Random, split: Split) -> Iterator[Exchange]:
    """Handwritten digits; one in four is a printed one instead (in training only)."""
    mine = [i for i in range(len(labels)) if is_mine(split, "digit", i, DIGIT_SHARE)]
    while True:
        question = rng.choice(ASK_DIGIT)
        if split == "train" and rng.random() < 0.25:
            label = str(rng.randrange(10))
            picture = _vary(rng, label, rng.randrange(len(FONTS)), SIDE, rng.uniform(0.6, 1.25))
        else:
            index = rng.choice(mine)
            label = str(labels[index])
            picture = _vary(rng, str(index), HANDWRITTEN, SIDE, rng.uniform(0.65, 1.0))
        yield _exchange(question, label, f"It is a {label}.", picture)


def texts(words: Sequence[str], rng: Random, split: Split) -> Iterator[Exchange]:
    """Printed texts of one to six letters: words, numbers, random letters."""
    words = [word for word in words if len(word) <= LONGEST]
    while True:
        text = _short_text(words, rng)
        if not is_mine(split, "printed", text):
            continue
        size = min(rng.uniform(0.45, 0.8), 2.0 / max(len(text), 3))
        picture = _vary(rng, text, rng.randrange(len(FONTS)), WIDE, size)
        yield _exchange(rng.choice(ASK_TEXT), text, f'It says "{text}".', picture)


def _short_text(words: Sequence[str], rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        word = rng.choice(words)
        return rng.choice((word, word, word.upper(), word.capitalize()))
    if kind < 0.75:
        return str(rng.randrange(10 ** rng.randint(1, 4)))
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    return "".join(rng.choice(letters) for _ in range(rng.randint(1, 4)))


def _vary(rng: Random, text: str, font: int, width: int, size: float) -> Picture:
    """A picture with drawn distortions; three in four are white on black or black on white, without noise."""
    if rng.random() < 0.75:
        ink, paper, noise = (255, 0, 0) if rng.random() < 0.5 else (0, 255, 0)
    else:
        dark, bright = rng.randint(0, 90), rng.randint(150, 255)
        ink, paper = (dark, bright) if rng.random() < 0.5 else (bright, dark)
        noise = rng.choice((0, 10, 25))
    return Picture(
        text=text,
        font=font,
        height=SIDE,
        width=width,
        size=rounded(size),
        angle=rounded(rng.uniform(-10, 10) if rng.random() < 0.6 else 0.0),
        right=rounded(rng.uniform(-0.08, 0.08)),
        down=rounded(rng.uniform(-0.08, 0.08)),
        ink=ink,
        paper=paper,
        noise=noise,
        seed=rng.getrandbits(32),
    )


def _exchange(question: str, label: str, seen: str, picture: Picture) -> Exchange:
    levels = {"low": label, "high": seen, "max": f"I look at the picture. {seen}"}
    return Exchange(question, label, levels, {"kind": "exact", "gold": label}, picture)


def is_test_digit(index: int) -> bool:
    """Is this one of the held-out digits?"""
    return is_held_out("digit", index, DIGIT_SHARE)
