"""Sums, differences and products worked out in writing, digit by digit, at three lengths.

In: whole numbers. Out: lines a small model can follow, each of which needs one fact about single digits.
Why so: the vocabulary has single digits only, so a column of a sum is two ids, and its result one or two.
"""

from __future__ import annotations

PLACES = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands", "millions")


def _digits(number: int, count: int) -> list[int]:
    """`count` digits, ones first."""
    return [number // 10**i % 10 for i in range(count)]


def width(*numbers: int) -> int:
    return max(len(str(abs(n))) for n in numbers)


def add_columns(a: int, b: int) -> list[str]:
    """27 + 48 -> "ones: 7 + 8 = 15, write 5, carry 1", "tens: 2 + 4 + 1 = 7"."""
    count, carry, lines = width(a, b), 0, []
    for place, x, y in zip(PLACES, _digits(a, count), _digits(b, count), strict=False):
        total = x + y + carry
        line = f"{place}: {x} + {y}" + (" + 1" if carry else "") + f" = {total}"
        carry = total // 10
        lines.append(line + (f", write {total % 10}, carry 1" if carry else ""))
    return [*lines, f"{PLACES[count]}: 1"] if carry else lines


def subtract_columns(a: int, b: int) -> list[str]:
    """75 - 48 (a >= b) -> "ones: 5 - 8: borrow, 15 - 8 = 7", "tens: 7 - 1 - 4 = 2"."""
    count, borrow, lines = width(a, b), 0, []
    for place, x, y in zip(PLACES, _digits(a, count), _digits(b, count), strict=False):
        start = f"{x} - 1" if borrow else f"{x}"
        left = x - borrow - y
        if left < 0:
            lines.append(f"{place}: {start} - {y}: borrow, {10 + x - borrow} - {y} = {left + 10}")
        else:
            lines.append(f"{place}: {start} - {y} = {left}")
        borrow = int(left < 0)
    return lines


def multiply_columns(a: int, digit: int) -> list[str]:
    """27 x 6 -> "ones: 7 x 6 = 42, write 2, carry 4", "tens: 2 x 6 = 12, 12 + 4 = 16"."""
    count, carry, lines = width(a), 0, []
    for i, (place, x) in enumerate(zip(PLACES, _digits(a, count), strict=False)):
        total = x * digit + carry
        line = f"{place}: {x} x {digit} = {x * digit}" + (f", {x * digit} + {carry} = {total}" if carry else "")
        carry = total // 10
        lines.append(line + (f", write {total % 10}, carry {carry}" if carry and i + 1 < count else ""))
    return lines


def _spelled(number: int) -> str:
    """27 -> "27 = 2 tens 7 ones"."""
    count = width(number)
    named = [f"{d} {PLACES[i]}" for i, d in reversed(list(enumerate(_digits(number, count))))]
    return f"{number} = {' '.join(named)}"


def add_lines(a: int, b: int) -> list[str]:
    """a + b for any signs; ends with the line "a + b = c"."""
    if b < 0:
        return [*subtract_lines(a, -b)[:-1], f"{a} + ({b}) = {a + b}"]
    if a < 0:
        return [f"{a} + {b} = {b} - {-a}", *subtract_lines(b, -a)[:-1], f"{a} + {b} = {a + b}"]
    result = f"{a} + {b} = {a + b}"
    return [result] if width(a, b) == 1 else [*add_columns(a, b), result]


def subtract_lines(a: int, b: int) -> list[str]:
    """a - b for b >= 0; ends with the line "a - b = c"."""
    result = f"{a} - {b} = {a - b}"
    if a < 0:
        return [f"{a} - {b} = -({-a} + {b})", *add_lines(-a, b), result]
    if a < b:
        return [f"{b} is more than {a}, so it is negative", *subtract_lines(b, a), result]
    return [result] if width(a, b) == 1 else [*subtract_columns(a, b), result]


def multiply_lines(a: int, b: int) -> list[str]:
    """a x b for a, b >= 0; ends with the line "a x b = c". With two longer factors: by the digits of b, then summed."""
    result = f"{a} x {b} = {a * b}"
    if width(a) == 1 and width(b) == 1:
        return [result]
    if width(b) == 1:
        return [*multiply_columns(a, b), result]
    if width(a) == 1:
        return [f"{a} x {b} = {b} x {a}", *multiply_columns(b, a), result]
    lines, total = [], 0
    for i, digit in enumerate(_digits(b, width(b))):
        if digit == 0:
            continue
        part = a * digit * 10**i
        lines += [*multiply_columns(a, digit), f"{a} x {digit * 10**i} = {part}"]
        if total:
            lines += add_lines(total, part)
        total += part
    return [*lines, result]


def work(a: int, op: str, b: int) -> list[str]:
    """The lines of one operation: + - x."""
    return {"+": add_lines, "-": subtract_lines, "x": multiply_lines}[op](a, b)


def value(a: int, op: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "x": a * b}[op]


def thoughts(a: int, op: str, b: int) -> dict[str, str]:
    """One operation on numbers >= 0 at the three efforts: one line; digit by digit; with places named and a check."""
    lines, result = work(a, op, b), value(a, op, b)
    return {
        "low": lines[-1],
        "high": "\n".join(lines),
        "max": "\n".join([_spelled(a), _spelled(b), *lines, *_checked(a, op, b, result)]),
    }


def _checked(a: int, op: str, b: int, result: int) -> list[str]:
    """The way back, digit by digit where it is a sum or difference of numbers >= 0."""
    if op == "x":
        return [f"check: {result} is {a} x {b}"]
    if op == "+":
        return ["check:", *subtract_lines(result, b)]
    return ["check:", *(add_lines(result, b) if result >= 0 else [f"{result} + {b} = {a}"])]
