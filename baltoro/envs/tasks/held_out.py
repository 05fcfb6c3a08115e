"""Which instances are kept for evaluation: by the hash of what they are, never by the order in which they are drawn.

In: a family's name and a key. Out: bool. One instance in ten is held out; pairs of two-digit numbers likewise, in
either order and for sums and differences alike. The rule is that of the tiny model's corpora
(`scripts/data/tiny/exchange.py`), so what it was not shown in training is not shown in rollouts either.
"""

from __future__ import annotations

import hashlib
import re

from baltoro.envs.base import Split

SHARE = 0.1
_SUM = re.compile(r"(?<![\d.])(\d\d) ?(?:[+-]|plus|minus|and|from) ?(\d\d)(?![\d.])")


def is_held_out(family: str, key: object) -> bool:
    """By hash of the key."""
    digest = hashlib.sha256(f"{family}:{key}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48 < SHARE


def is_mine(split: Split, family: str, key: object) -> bool:
    """Does an instance belong to `split`?"""
    return is_held_out(family, key) == (split == "eval")


def pair_is_held_out(a: int, b: int) -> bool:
    """Two two-digit numbers whose sum and difference are for evaluation."""
    low, high = sorted((abs(a), abs(b)))
    return low >= 10 and high < 100 and is_held_out("pair", (low, high))


def shows_held_out_pair(text: str) -> bool:
    """Does a text ask for, or work out, a sum or difference of such a pair?"""
    return any(pair_is_held_out(int(m[1]), int(m[2])) for m in _SUM.finditer(text))
