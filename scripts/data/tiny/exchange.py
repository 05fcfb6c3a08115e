"""What the families hand over: questions with worked answers, dialogues made of them, and which are held out.

In: draws of a family. Out: Dialogue, as OpenAI-style messages with the options they are rendered with.
Invariants: whether an instance is held out depends on its own key alone, never on the order of generation.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from scripts.data.tiny.draw import Picture

Json = dict[str, Any]
Split = Literal["train", "eval"]
Effort = Literal["low", "high", "max"]

# How often each mode comes in training. "plain" is thinking without a word about effort: what `baltoro serve` does
# where nothing is asked; it thinks as for "high". "off" is no thinking.
MODES: Mapping[str, int] = {"plain": 36, "max": 16, "high": 14, "low": 16, "off": 18}
PICTURE_MODES: Mapping[str, int] = {"plain": 34, "max": 10, "high": 8, "low": 10, "off": 38}
HARD_MODES: Mapping[str, int] = {"plain": 42, "max": 18, "high": 16, "low": 16, "off": 8}
SYSTEMS = (
    "You are a helpful assistant.", "You are tiny, a small model.", "Answer briefly.", "You are a careful assistant.",
    "Be short and exact.", "You help with numbers and words.", "You are an assistant that answers questions.",
    "Be polite.", "Think before you answer.", "You are a friendly assistant. Answer in one sentence.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer.

    thoughts   what is thought at each effort; a missing one falls back to "high", an empty mapping is no thinking
    check      how an answer is judged: {"kind": ..., "gold": ...}, see baltoro/bench/scoring.py
    picture    shown with the question
    """

    question: str
    answer: str
    thoughts: Mapping[str, str] = field(default_factory=dict)
    check: Json = field(default_factory=dict)
    picture: Picture | None = None

    def thought(self, effort: str) -> str:
        return self.thoughts.get(effort) or self.thoughts.get("high", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """Messages that end with the assistant's. `learns`: from all of its turns, or from the last alone."""

    messages: Sequence[Json]
    thinking: bool
    effort: Effort | None = None
    tools: Sequence[Json] = ()
    response_format: Json | None = None
    tool_choice: str | None = None
    learns: Literal["all", "last"] = "all"
    pictures: Sequence[Picture] = ()


def is_held_out(family: str, key: object, share: float = 0.1) -> bool:
    """By hash of the key."""
    digest = hashlib.sha256(f"{family}:{key}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48 < share


def is_mine(split: Split, family: str, key: object, share: float = 0.1) -> bool:
    """Does an instance belong to `split`?"""
    return is_held_out(family, key, share) == (split == "eval")


def pair_is_held_out(a: int, b: int) -> bool:
    """Pairs of two-digit numbers kept out of every sum and difference, in either order."""
    low, high = sorted((abs(a), abs(b)))
    return low >= 10 and high < 100 and is_held_out("pair", (low, high))


_SUM = re.compile(r"(?<![\d.])(\d\d) ?(?:[+-]|plus|minus|and|from) ?(\d\d)(?![\d.])")


def shows_held_out_pair(text: str) -> bool:
    """Does a text work out, or ask for, a sum or difference of a held-out pair?"""
    return any(pair_is_held_out(int(m[1]), int(m[2])) for m in _SUM.finditer(text))


def pick_mode(rng: Random, modes: Mapping[str, int] = MODES) -> tuple[bool, Effort | None, str]:
    """(thinking, effort to ask for, key of the thoughts to use)."""
    mode = rng.choices(list(modes), list(modes.values()))[0]
    if mode == "off":
        return False, None, ""
    if mode == "plain":
        return True, None, "high"
    return True, mode, mode  # type: ignore[return-value]


def reply(exchange: Exchange, thinking: bool, level: str) -> Json:
    """The assistant's message."""
    message: Json = {"role": "assistant", "content": exchange.answer}
    if thinking and (thought := exchange.thought(level)):
        message["reasoning_content"] = thought
    return message


def converse(exchanges: Sequence[Exchange], rng: Random, modes: Mapping[str, int] = MODES) -> Dialogue:
    """A dialogue of these exchanges in one mode; at times with a system message, at times with forgotten thoughts."""
    thinking, effort, level = pick_mode(rng, modes)
    messages: list[Json] = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for exchange in exchanges:
        messages.append({"role": "user", "content": _content(exchange, rng)})
        messages.append(reply(exchange, thinking, level))
    is_forgetful = len(exchanges) > 1 and thinking and rng.random() < 0.3
    if is_forgetful:  # as clients do: they send back answers without the thoughts
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages[:-1]] + messages[-1:]
    pictures = [e.picture for e in exchanges if e.picture is not None]
    learns: Literal["all", "last"] = "last" if is_forgetful else "all"
    return Dialogue(messages=messages, thinking=thinking, effort=effort, learns=learns, pictures=pictures)


def grouped(
    exchanges: Iterator[Exchange], rng: Random, turns: Sequence[int], modes: Mapping[str, int] = MODES
) -> Iterator[Dialogue]:
    """Dialogues of so many turns as drawn from `turns`."""
    while True:
        group = [e for _, e in zip(range(rng.choice(turns)), exchanges, strict=False)]
        if not group:
            return
        yield converse(group, rng, modes)


def _content(exchange: Exchange, rng: Random) -> Any:
    """A picture comes before its question or, less often, after it."""
    if exchange.picture is None:
        return exchange.question
    parts = [{"type": "picture"}, {"type": "text", "text": exchange.question}]
    return parts if rng.random() < 0.6 else parts[::-1]
