"""Short word problems of one or two steps, by templates.

In: draws. Out: exchanges. A problem is held out if its first step is a held-out pair, or by its numbers and story.
"""

# ruff: noqa: E501 (tables, one entry a line)

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from scripts.data.tiny import worked
from scripts.data.tiny.exchange import Exchange, Split, is_mine, shows_held_out_pair
from scripts.data.tiny.pools import Pools

# (steps, story, question, why). A step is "x op y" where x, y are letters of the story, or r for the result so far.
TEMPLATES: tuple[tuple[str, str, str, str], ...] = (
    ("a+b", "{N} has {a} {t}. {M} gives {N} {b} more.", "How many {t} does {N} have now?", "{N} gets more, so I add"),
    ("a+b", "{N} has {a} {t} and {M} has {b} {t}.", "How many {t} do they have together?", "Together means that I add"),
    ("a+b", "There are {a} {t} in one box and {b} {t} in another.", "How many {t} are there in all?", "In all means that I add"),
    ("a+b", "{N} found {a} {t} on {d} and {b} {t} the day after.", "How many {t} did {N} find?", "Both days count, so I add"),
    ("a+b", "A shop sold {a} {t} in the morning and {b} in the afternoon.", "How many {t} did it sell?", "Both count, so I add"),
    ("a+b", "{N} read {a} pages yesterday and {b} pages today.", "How many pages did {N} read?", "Both days count, so I add"),
    ("a-b", "{N} has {a} {t}. {N} gives {b} of them to {M}.", "How many {t} does {N} have left?", "{N} gives away, so I subtract"),
    ("a-b", "There were {a} {t} in the shop. {b} were sold.", "How many {t} are left?", "Sold ones are gone, so I subtract"),
    ("a-b", "{N} had {a} {t} and lost {b}.", "How many are left?", "Lost ones are gone, so I subtract"),
    ("a-b", "{N} has {a} {t} and {M} has {b}.", "How many more {t} does {N} have than {M}?", "How many more means that I subtract"),
    ("a-b", "A book has {a} pages. {N} has read {b} of them.", "How many pages are left to read?", "I subtract what is read"),
    ("a-b", "A bus carries {a} people. {b} get off.", "How many people stay on the bus?", "People leave, so I subtract"),
    ("axb", "There are {a} {t} in each box. {N} has {b} boxes.", "How many {t} does {N} have?", "Each box counts, so I multiply"),
    ("axb", "{N} buys {b} packs of {a} {t}.", "How many {t} does {N} buy?", "Each pack counts, so I multiply"),
    ("axb", "One ticket costs {a} dollars. {N} buys {b} tickets.", "How many dollars does {N} pay?", "Each ticket costs the same, so I multiply"),
    ("axb", "{N} reads {a} pages every day for {b} days.", "How many pages does {N} read?", "Each day counts, so I multiply"),
    ("a+b r-c", "{N} has {a} {t}, gets {b} more and then gives away {c}.", "How many {t} does {N} have at the end?", "First I add, then I subtract"),
    ("a-b r+c", "{N} had {a} {t}, lost {b} and found {c}.", "How many {t} does {N} have now?", "First I subtract, then I add"),
    ("a+b r+c", "{N} has {a} {t}, {M} has {b} and {O} has {c}.", "How many {t} do the three have together?", "I add all three"),
    ("a-b r-c", "A shop has {a} {t}. It sells {b} on {d} and {c} on the next day.", "How many {t} are left?", "I subtract both days"),
    ("axb r+c", "{N} has {b} boxes with {a} {t} each, and {c} more {t}.", "How many {t} does {N} have?", "First I multiply, then I add"),
    ("axb r-c", "{N} buys {b} packs of {a} {t} and gives away {c}.", "How many {t} does {N} keep?", "First I multiply, then I subtract"),
    ("a+b r-c", "A bus has {a} passengers. At a stop {b} get on and {c} get off.", "How many passengers are on the bus now?", "First I add, then I subtract"),
    ("axb r+c", "{N} works {a} hours a day for {b} days, and {c} hours on {d}.", "How many hours does {N} work?", "First I multiply, then I add"),
)  # fmt: skip
ENDINGS = ("", "", "", " Answer with a number.", " Give the number only.")


def exchanges(pools: Pools, rng: Random, split: Split) -> Iterator[Exchange]:
    """Without end."""
    while True:
        steps, story, question, why = rng.choice(TEMPLATES)
        numbers = _numbers(steps, rng)
        lines, result = _solve(steps, numbers)
        if result < 0 or not is_mine(split, "problem", (story, *numbers.values())):
            continue
        if split == "train" and (shows_held_out_pair("\n".join(lines["max"]))):
            continue
        words = _words(pools, rng, split)
        thing = words["t"] if "{t}" in story else ""
        text = f"{story} {question}{rng.choice(ENDINGS)}".format(**words, **numbers)
        thoughts = {
            "low": "\n".join(lines["low"]),
            "high": "\n".join([f"{why.format(**words)}.", *lines["high"]]),
            "max": "\n".join([story.format(**words, **numbers), f"{why.format(**words)}.", *lines["max"], f"answer: {result}"]),
        }  # fmt: skip
        is_bare = text.endswith(("number.", "only."))
        answer = str(result) if is_bare else f"The answer is {result}{' ' + thing if thing else ''}."
        yield Exchange(text, answer, thoughts, {"kind": "number", "gold": result})


def _words(pools: Pools, rng: Random, split: Split) -> dict[str, str]:
    names: list[str] = []
    while len(names) < 3:
        name = pools.pick(rng, "first", split)
        if name not in names:
            names.append(name)
    things = pools.pick(rng, "thing", split)
    return {"N": names[0], "M": names[1], "O": names[2], "t": things, "d": rng.choice(pools.lists["day"])}


def _numbers(steps: str, rng: Random) -> dict[str, int]:
    if "x" in steps:
        return {"a": rng.randint(2, rng.choice((9, 12, 30))), "b": rng.randint(2, 9), "c": rng.randint(2, 30)}
    a = rng.randint(3, 99)
    return {"a": a, "b": rng.randint(2, a if "a-b" in steps else 99), "c": rng.randint(2, 40)}


def _solve(steps: str, numbers: dict[str, int]) -> tuple[dict[str, list[str]], int]:
    """Lines at each effort, and the result."""
    lines: dict[str, list[str]] = {"low": [], "high": [], "max": []}
    result = 0
    for step in steps.split():
        left = result if step[0] == "r" else numbers[step[0]]
        right = numbers[step[2]]
        result = worked.value(left, step[1], right)
        found = worked.work(left, step[1], right)
        lines["low"].append(found[-1])
        lines["high"] += found
        lines["max"] += found
        if result < 0:
            break
    return lines, result
