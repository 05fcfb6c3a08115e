"""Dialogues about sums of two digits, in many wordings, with and without thinking; and a little small talk.

In: a seed. Out: conversations as OpenAI-style messages with the options they are rendered with. Deterministic.
Every pair of digits comes equally often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ASKS = (
    "What is {a} + {b}?", "What is {a} plus {b}?", "What's {a} + {b}?", "How much is {a} + {b}?", "{a} + {b} = ?",
    "{a} + {b}", "{a}+{b}", "{a}+{b}=?", "Add {a} and {b}.", "Compute {a} + {b}.", "Calculate {a} + {b}.",
    "What is the sum of {a} and {b}?", "Please add {a} and {b}.", "what is {a}+{b}?", "How much is {a} plus {b}?",
    "Can you add {a} and {b}?", "Tell me what {a} + {b} is.", "What does {a} + {b} equal?",
)  # fmt: skip
SYSTEMS = ("You are a helpful assistant.", "You add digits.", "Answer shortly.", "You are a careful assistant.")
TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning"), "A greeting.", "Hello! Give me two digits to add."),
    (
        ("Who are you?", "What are you?", "What is your name?"),
        "A question about me.",
        "I am Baltoro mini, a very small model.",
    ),
    (
        ("What can you do?", "How can you help me?"),
        "A question about me.",
        "I can add two digits and continue Python documentation.",
    ),
    (("Thanks", "Thank you", "Thank you!"), "They say thanks.", "You are welcome."),
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with the assistant's, and how they are rendered."""

    messages: list[dict[str, Any]]
    thinking: bool
    effort: str | None


def conversations(count: int, seed: int) -> Iterator[Conversation]:
    """`count` conversations of one to three questions."""
    draw = random.Random(seed)
    pairs = _pairs(draw)
    for _ in range(count):
        thinking = draw.random() < 0.5
        effort = draw.choice(("low", "high", "max")) if thinking and draw.random() < 0.15 else None
        messages: list[dict[str, Any]] = []
        if draw.random() < 0.15:
            messages.append({"role": "system", "content": draw.choice(SYSTEMS)})
        if draw.random() < 0.08:
            messages += _talk(draw, thinking)
        for _ in range(draw.choice((1, 1, 2, 3))):
            messages += _sum(draw, *next(pairs), thinking, effort)
        yield Conversation(messages, thinking, effort)


def _pairs(draw: random.Random) -> Iterator[tuple[int, int]]:
    everything = [(a, b) for a in range(10) for b in range(10)]
    while True:
        draw.shuffle(everything)
        yield from everything


def _sum(draw: random.Random, a: int, b: int, thinking: bool, effort: str | None) -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": f"{a} + {b} = {a + b}."}
    if thinking:
        is_worked = effort in ("high", "max") or (effort is None and draw.random() < 0.4)
        answer["reasoning_content"] = worked(a, b) if is_worked else f"{a} + {b} = {a + b}."
    return [{"role": "user", "content": draw.choice(ASKS).format(a=a, b=b)}, answer]


def worked(a: int, b: int) -> str:
    """Counting up from the larger number, where that is short."""
    large, small = max(a, b), min(a, b)
    if not 1 <= small <= 5:
        return f"{a} + {b} = {a + b}."
    steps = ", ".join(str(large + i) for i in range(1, small + 1))
    return f"Start at {large} and count up {small}: {steps}. {a} + {b} = {a + b}."


def _talk(draw: random.Random, thinking: bool) -> list[dict[str, Any]]:
    asks, thought, reply = draw.choice(TALK)
    answer: dict[str, Any] = {"role": "assistant", "content": reply}
    if thinking:
        answer["reasoning_content"] = thought
    return [{"role": "user", "content": draw.choice(asks)}, answer]
