"""Spelling and small questions about words and numbers: what the vocabulary hides and other families need.

In: words of WordNet. Out: exchanges. A tenth of the words is held out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from scripts.data.tiny.exchange import Exchange, Split, is_mine
from scripts.data.tiny.pools import Pools
from scripts.data.tiny.traces import spelled

Asked = tuple[str, str, dict[str, str], str]  # question, answer, thoughts, kind of check


def exchanges(pools: Pools, rng: Random, split: Split) -> Iterator[Exchange]:
    """Without end."""
    while True:
        word = rng.choice(pools.lists["word"])
        if not is_mine(split, "letters", word):
            continue
        question, answer, thoughts, kind = rng.choice(KINDS)(word, rng)
        gold: int | str = int(answer) if kind == "number" else answer
        yield Exchange(question, answer, thoughts, {"kind": kind, "gold": gold})


def _spell(word: str, rng: Random) -> Asked:
    asks = (f"Spell the word {word}.", f"How do you spell {word}?", f"Spell {word}.", f"Write {word} letter by letter.")
    return rng.choice(asks), spelled(word), {"high": f"The letters of {word}."}, "exact"


def _count(word: str, rng: Random) -> Asked:
    numbered = " ".join(f"{letter}{i + 1}" for i, letter in enumerate(word))
    asks = (
        f"How many letters are in the word {word}?",
        f"How long is the word {word}?",
        f"Count the letters of {word}.",
    )
    levels = {"low": spelled(word), "high": numbered, "max": f"{spelled(word)}\n{numbered}"}
    return rng.choice(asks), str(len(word)), levels, "number"


def _ends(word: str, rng: Random) -> Asked:
    place, letter = rng.choice((("first", word[0]), ("last", word[-1]), ("second", word[1])))
    levels = {"low": spelled(word), "high": f"{spelled(word)}: the {place} is {letter}"}
    return f"What is the {place} letter of {word}?", letter, levels, "exact"


def _join(word: str, rng: Random) -> Asked:
    asks = (f"Which word is spelled {spelled(word)}?", f"Put these letters together: {spelled(word)}")
    return rng.choice(asks), word, {"high": f"{spelled(word)} is {word}"}, "exact"


def _backward(word: str, rng: Random) -> Asked:
    back = word[::-1]
    asks = (f"Write {word} backwards.", f"Reverse the word {word}.", f"What is {word} spelled backward?")
    levels = {"low": spelled(back), "high": f"{spelled(word)}\nbackward: {spelled(back)}"}
    return rng.choice(asks), back, levels, "exact"


def _case(word: str, rng: Random) -> Asked:
    asks = (f"Write {word} in capital letters.", f"Put {word} in upper case.")
    return rng.choice(asks), word.upper(), {"high": spelled(word.upper())}, "exact"


def _has(word: str, rng: Random) -> Asked:
    letter = rng.choice((rng.choice(word), rng.choice("abcdefghijklmnopqrstuvwxyz")))
    found = word.count(letter)
    question = f"How many times does the letter {letter} appear in {word}?"
    return question, str(found), {"low": spelled(word), "high": f"{word}: {spelled(word)}: {found}"}, "number"


KINDS: tuple[Callable[[str, Random], Asked], ...] = (_spell, _count, _ends, _join, _backward, _case, _has)
