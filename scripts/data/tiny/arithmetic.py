"""Sums, differences and small products as people ask for them, with the working at three lengths.

In: draws. Out: exchanges. Mostly two digits; one pair in ten of two-digit numbers is held out (in either order, from
every sum and difference of every family), and the held-out split asks about those alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from scripts.data.tiny import worked
from scripts.data.tiny.exchange import Exchange, Split, is_mine, pair_is_held_out, shows_held_out_pair

EQUATION = "{a} {op} {b} = {c}."
ASKS = {
    "+": (
        "What is {a} + {b}?", "What is {a} plus {b}?", "What's {a} + {b}?", "How much is {a} + {b}?", "{a} + {b} = ?",
        "{a} + {b}", "{a}+{b}", "{a}+{b}=?", "Add {a} and {b}.", "Compute {a} + {b}.", "Calculate {a} + {b}.",
        "What is the sum of {a} and {b}?", "Please add {a} and {b}.", "what is {a}+{b}?", "How much is {a} plus {b}?",
        "Can you add {a} and {b}?", "Tell me what {a} + {b} is.", "What does {a} + {b} equal?", "{a} plus {b}",
        "I need the sum of {a} and {b}.", "Work out {a} + {b}.", "What do you get if you add {b} to {a}?",
    ),
    "-": (
        "What is {a} - {b}?", "What is {a} minus {b}?", "What's {a} - {b}?", "How much is {a} - {b}?", "{a} - {b} = ?",
        "{a} - {b}", "{a}-{b}", "{a}-{b}=?", "Subtract {b} from {a}.", "Compute {a} - {b}.", "Calculate {a} - {b}.",
        "What is the difference of {a} and {b}?", "Take {b} away from {a}.", "what is {a}-{b}?", "Work out {a} - {b}.",
        "How much is {a} minus {b}?", "Tell me what {a} - {b} is.", "What does {a} - {b} equal?", "{a} minus {b}",
        "What is left if you take {b} from {a}?", "Please subtract {b} from {a}.",
    ),
    "x": (
        "What is {a} x {b}?", "What is {a} times {b}?", "What's {a} * {b}?", "How much is {a} * {b}?", "{a} * {b} = ?",
        "{a} x {b}", "{a}*{b}", "Multiply {a} by {b}.", "Compute {a} * {b}.", "Calculate {a} x {b}.", "{a} times {b}",
        "What is the product of {a} and {b}?", "Please multiply {a} and {b}.", "what is {a}*{b}?",
        "Work out {a} x {b}.",
    ),
}  # fmt: skip
ONLY = (" Answer with the number only.", " Just the number, please.", " Reply with the result only.", " Number only.")


def exchanges(rng: Random, split: Split) -> Iterator[Exchange]:
    """Without end."""
    while True:
        op = rng.choices("+-x", (45, 45, 10))[0]
        a, b = _numbers(op, rng, split)
        exchange = ask(a, op, b, rng)
        is_leak = split == "train" and shows_held_out_pair(exchange.thoughts["max"])  # its check is another sum
        if _belongs(a, op, b, split) and not is_leak:
            yield exchange


def ask(a: int, op: str, b: int, rng: Random) -> Exchange:
    """One question about a op b."""
    result = worked.value(a, op, b)
    question = rng.choice(ASKS[op]).format(a=a, b=b)
    answer = EQUATION.format(a=a, op=op, b=b, c=result)
    if rng.random() < 0.12:
        question, answer = question + rng.choice(ONLY), str(result)
    return Exchange(question, answer, worked.thoughts(a, op, b), {"kind": "number", "gold": result})


def two_digit(rng: Random, op: str, split: Split) -> Exchange:
    """A sum or difference of two numbers of two digits."""
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if pair_is_held_out(a, b) == (split == "eval"):
            return ask(a, op, b, rng)


def _numbers(op: str, rng: Random, split: Split) -> tuple[int, int]:
    if op == "x":
        return rng.randint(0, rng.choice((9, 99, 99, 999))), rng.randint(0, 9)
    if split == "eval" or rng.random() < 0.72:
        return rng.randint(10, 99), rng.randint(10, 99)
    tops = (9, 99, 999)
    return rng.randint(0, rng.choice(tops)), rng.randint(0, rng.choice(tops))


def _belongs(a: int, op: str, b: int, split: Split) -> bool:
    if op != "x" and 10 <= a < 100 and 10 <= b < 100:
        return pair_is_held_out(a, b) == (split == "eval")
    if max(a, b) < 20:  # too few to keep any out
        return split == "train"
    return is_mine(split, "arithmetic", (a, op, b))
