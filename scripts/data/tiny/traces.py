"""Worked thinking for reasoning-gym's families: words and letters, bits and bases, sequences, probabilities.

In: an entry's metadata. Out: thoughts at three efforts; None where the entry cannot be worked out in these steps.
Our own working, not the package's: each line needs little more than the one before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import comb, gcd
from typing import Any

from scripts.data.tiny import worked

Meta = Mapping[str, Any]
Thoughts = dict[str, str]
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


def thoughts(low: str, high: str, more: str) -> Thoughts:
    """`more` is the last line of "max"."""
    return {"low": low, "high": high, "max": f"{high}\n{more}"}


def spelled(word: str) -> str:
    return " ".join(word)


def chain_sum(meta: Meta) -> Thoughts | None:
    first, *rest = meta["expression"].split()
    total, low, high = int(first), [], []
    for op, number in zip(rest[::2], rest[1::2], strict=True):
        lines = worked.work(total, op, int(number))
        low.append(lines[-1])
        high += lines
        total = worked.value(total, op, int(number))
    return thoughts("\n".join(low), "\n".join(high), f"answer: {total}")


def products(meta: Meta) -> Thoughts | None:
    a, b = (int(n) for n in meta["expression"].split(" * "))
    lines = worked.multiply_lines(a, b)
    return thoughts(lines[-1], "\n".join(lines), f"answer: {a * b}")


def gcd_steps(a: int, b: int) -> list[str]:
    """Euclid: 156 = 3 x 48 + 12."""
    a, b, lines = max(a, b), min(a, b), []
    while b:
        lines.append(f"{a} = {a // b} x {b} + {a % b}")
        a, b = b, a % b
    return lines


def gcd_trace(meta: Meta) -> Thoughts | None:
    a, b = meta["numbers"]
    lines, found = gcd_steps(a, b), gcd(a, b)
    high = "\n".join([*lines, f"gcd = {found}"])
    rests = " ".join([str(max(a, b)), *(line.split(" x ")[1].split(" ")[0] for line in lines), "0"])
    return thoughts(rests, high, f"{a} = {a // found} x {found}, {b} = {b // found} x {found}")


def lcm_trace(meta: Meta) -> Thoughts | None:
    a, b = meta["numbers"]
    found = gcd(a, b)
    lines = [*gcd_steps(a, b), f"gcd = {found}", f"{a} : {found} = {a // found}", *worked.multiply_lines(b, a // found)]
    result = a * b // found
    return thoughts(f"gcd = {found}, lcm = {result}", "\n".join([*lines, f"lcm = {result}"]), f"answer: {result}")


def fraction(meta: Meta) -> Thoughts | None:
    a, b = meta["numerator"], meta["denominator"]
    found = gcd(a, b)
    divided = [f"{a} : {found} = {a // found}", f"{b} : {found} = {b // found}"]
    return thoughts(
        f"gcd = {found}",
        "\n".join([*gcd_steps(a, b), f"gcd = {found}", *divided]),
        f"answer: {a // found}/{b // found}",
    )


def letter_counting(meta: Meta) -> Thoughts | None:
    letter, total, high, low = meta["target_letter"], 0, [], []
    for word in meta["span"]:
        found = word.lower().count(letter)
        total += found
        low.append(f"{word} {found}")
        high.append(f"{word}: {spelled(word.lower())}: {found}, total {total}")
    if str(total) != meta["answer"]:
        return None
    return thoughts(f"{', '.join(low)}", "\n".join(high), f"The letter {letter} appears {total} times.")


def spell_backward(meta: Meta) -> Thoughts | None:
    word = meta["word"]
    back = word[::-1]
    return thoughts(spelled(back), f"{spelled(word)}\nbackward: {spelled(back)}", f"together: {back}")


def word_reversal(meta: Meta) -> Thoughts | None:
    words = meta["words"]
    high = [f"{i + 1} {w}" for i, w in enumerate(words)]
    back = [f"{len(words) - i} {w}" for i, w in enumerate(reversed(words))]
    return thoughts(f"{len(words)} words", "\n".join(high), "\n".join(["from the end:", *back]))


def word_sorting(meta: Meta) -> Thoughts | None:
    """By first letters, capitals first; words that share one are compared further."""
    words, target = meta["transformed_words"], meta["sorted_words"]
    firsts = [f"{w}: {spelled(w[:3])}" for w in words]
    low = " ".join(w[0] for w in target)
    picks = [f"{i + 1} {w}" for i, w in enumerate(target)]
    is_up = meta["direction"] == "ascending"
    rule = "capitals first, a to z" if is_up else "z to a, capitals last"
    return thoughts(low, "\n".join([*firsts, f"{meta['direction']}: {rule}", f"letters: {low}"]), "\n".join(picks))


def ransom_note(meta: Meta) -> Thoughts | None:
    note, pile, lines, is_good = meta["ransom_note"], meta["magazine"], [], True
    for letter in note:
        if letter not in pile:
            lines.append(f"{letter}: {spelled(pile)}: no")
            is_good = False
            break
        lines.append(f"{letter}: {spelled(pile)}: yes")
        pile = pile.replace(letter, "", 1)
    return thoughts("yes" if is_good else f"no {lines[-1][0]}", "\n".join(lines), f"So it is {is_good}.")


def isomorphic(meta: Meta) -> Thoughts | None:
    one, two = meta["words"]
    there: dict[str, str] = {}
    back: dict[str, str] = {}
    lines, is_good = [], len(one) == len(two)
    for x, y in zip(one, two, strict=False):
        if there.get(x, y) != y or back.get(y, x) != x:
            lines.append(f"{x} {y} no")
            is_good = False
            break
        lines.append(f"{x} {y} " + ("again" if x in there else "new"))
        there[x], back[y] = y, x
    if is_good != meta["solution"]:
        return None
    high = "\n".join([spelled(one), spelled(two), *lines])
    return thoughts("match" if is_good else lines[-1], high, f"So it is {is_good}.")


def count_bits(meta: Meta) -> Thoughts | None:
    number, count, lines = meta["number"], 0, []
    bits = bin(number)[2:]
    while number:
        count += number % 2
        lines.append(f"{number} {'odd' if number % 2 else 'even'}: {number % 2}, count {count}")
        number //= 2
    return thoughts(bits, "\n".join(lines), f"binary {spelled(bits)} has {count} ones")


def base_conversion(meta: Meta) -> Thoughts | None:
    text, base, target = meta["source_repr"], meta["source_base"], meta["target_base"]
    number, lines = 0, []
    for letter in text:
        digit = LETTERS.index(letter)
        lines.append(f"{number} x {base} + {digit} = {number * base + digit}")
        number = number * base + digit
    rest = number
    while rest or not number:
        lines.append(f"{rest} = {rest // target} x {target} + {rest % target}: {LETTERS[rest % target]}")
        rest //= target
        if not number:
            break
    return thoughts(f"{number} in base 10", "\n".join(lines), f"from the end: {spelled(meta['target_repr'])}")


def leg_counting(meta: Meta) -> Thoughts | None:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    total, high, low = 0, [], []
    for animal, count in meta["animals"].items():
        legs = ANIMALS[animal]
        product = count * legs
        low.append(f"{animal} {product}")
        high.append(f"{animal}: {legs} legs, {count} x {legs} = {product}")
        if total:
            high += worked.add_lines(total, product)
        total += product
    return thoughts(", ".join(low), "\n".join(high), f"total: {total}")


def coin_flip(meta: Meta) -> Thoughts | None:
    n, k, kind = meta["num_trials"], meta["k_heads"], meta["problem_type"]
    chosen = [k] if kind == "exact" else list(range(k, n + 1))
    ways = [comb(n, i) for i in chosen]
    total = sum(ways)
    rows = [f"{i} heads: {w} ways" for i, w in zip(chosen, ways, strict=True)]
    result = f"{total}/{2**n} = {format(total / 2**n, '.10g')}"
    high = "\n".join([f"{n} flips: {2**n} outcomes", *rows, result])
    return thoughts(result, high, f"{total} of {2**n} outcomes count.")


def number_filtering(meta: Meta) -> Thoughts | None:
    limit, word = meta["filter_value"], meta["operation"]
    keeps_smaller = word in ("keep_smaller", "remove_larger")
    lines = []
    for number in meta["original_numbers"]:
        side = "smaller" if float(number) < float(limit) else "larger" if float(number) > float(limit) else "equal"
        lines.append(f"{number} {side}: {'keep' if number in meta['result'] else 'drop'}")
    rule = f"keep the {'smaller' if keeps_smaller else 'larger'} ones"
    return thoughts(rule, "\n".join([f"{rule}, limit {limit}", *lines]), f"{len(meta['result'])} left")


def needle(meta: Meta) -> Thoughts | None:
    """The statement that answers the question is found by its verb and object."""
    asked = re.match(r"Who (.+)\? Reply only with a name\.$", meta["question"])
    found = re.search(rf"([\w' -]+?) {re.escape(asked[1])}\.", meta["text"]) if asked else None
    if not found:
        return None
    line = found[0].strip()
    return thoughts(line, f"I look for: {asked[1] if asked else ''}\n{line}", f"The name is {found[1].strip()}.")


def simple_equation(meta: Meta) -> Thoughts | None:
    """a*x + b = c: move b, divide by a."""
    letter, (left, right) = meta["variable"], meta["equation"].split(" = ")
    slope = shift = 0
    for term in re.findall(r"[+-]?[^+-]+", left.replace(" ", "")):
        if letter in term:
            factor = term.replace(letter, "").rstrip("*").replace("*", "")
            slope += int(factor + "1" if factor in ("", "+", "-") else factor)
        else:
            shift += int(term)
    total = int(right)
    if slope == 0 or (total - shift) % slope:
        return None
    lines = []
    if shift:
        op, size = ("-", shift) if shift > 0 else ("+", -shift)
        lines += worked.work(total, op, size)
    moved = total - shift
    result = moved // slope
    lines.append(f"{slope}*{letter} = {moved}")
    divided = [f"{letter} = {moved} : {slope} = {result}"]
    check = f"check: {slope} x {result} = {moved}"
    return thoughts("\n".join([lines[-1], *divided]), "\n".join([*lines, *divided]), check)


def number_sequence(meta: Meta) -> Thoughts | None:
    """The rule in words, then its steps on the last term."""
    numbers = meta["sequence"]
    shown, target = numbers[:-1], numbers[-1]
    number, lines = shown[-1], []
    for step in filter(None, meta["rule"].split(" then ")):
        word, _, size = step.rpartition(" ")
        if step == "add previous":
            new = number + shown[-2]
            lines.append(f"{number} + {shown[-2]} = {new}")
        elif word == "add":
            new = number + int(size)
            lines.append(f"{number} + {size} = {new}")
        elif word == "multiply by" or step == "double":
            factor = 2 if step == "double" else int(size)
            new = number * factor
            lines.append(f"{number} x {factor} = {new}")
        else:
            new = number // 2 if step == "halve" else number * number
            lines.append(f"{step} {number} = {new}")
        number = new
    if number != target or not lines:
        return None
    gaps = ", ".join(str(y - x) for x, y in pairwise(shown))
    high = "\n".join([f"differences: {gaps}", f"rule: {meta['rule']}", *lines])
    return thoughts(meta["rule"], high, f"next: {target}")


Trace = Callable[[Meta], Thoughts | None]
