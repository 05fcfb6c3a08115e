"""Bytes as people write and read them: 80G, 141GiB, 1.56 TB."""

from __future__ import annotations

import re

from baltoro.errors import ConfigError

DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """80G and 80GB are 80 * 10^9, 80GiB is 80 * 2^30, 1_000 is itself. Errors: ConfigError."""
    found = NUMBER.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ConfigError(f"{text!r} is not a number of bytes; write for example 80G, 141GiB or 5000000000")
    letter = found[2].upper()
    unit = 1 << (10 * "KMGT".index(letter) + 10) if found[3] else DECIMAL[letter]
    whole, _, fraction = found[1].replace("_", "").partition(".")
    # in integers: a float has 53 bits, and 1560860324864.5 units need more
    tenths: int = 10 ** len(fraction)
    return int(whole) * unit + int(fraction or 0) * unit // tenths


def format_bytes(count: int) -> str:
    """Three digits and a decimal unit."""
    for letter in "TGMK":
        if abs(count) >= DECIMAL[letter]:
            value = count / DECIMAL[letter]
            return f"{value:.3g} {letter}B" if abs(value) < 999.5 else f"{value:,.0f} {letter}B"
    return f"{count} B"


def format_count(count: int) -> str:
    """Four digits and K, M, B or T, as parameters are quoted."""
    for letter, unit in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= unit:
            return f"{count / unit:.4g}{letter}"
    return str(count)
