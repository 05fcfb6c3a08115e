"""Bytes as people write and read them."""

from __future__ import annotations

import pytest

from baltoro.cli.units import format_bytes, format_count, parse_bytes
from baltoro.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0), ("17", 17), ("5_000", 5000), ("12B", 12), ("80G", 80 * 10**9), ("80GB", 80 * 10**9),
        ("141GiB", 141 * 2**30), ("141Gi", 141 * 2**30), ("1.5k", 1500), ("0.5 MiB", 2**19), ("2T", 2 * 10**12),
        (" 3kib ", 3072), ("1560860324864.9K", 1560860324864900),
    ],
)  # fmt: skip
def test_bytes_are_read_in_decimal_and_binary_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "G", "-1", "1.", "12X", "1e9", "12iB", "1 2"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a number of bytes; write for example 80G"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (999, "999 B"), (27_648, "27.6 KB"), (54_263_808, "54.3 MB"), (999_600, "1,000 KB"),
        (-54_553_702_128, "-54.6 GB"), (1_560_860_324_864, "1.56 TB"), (5 * 10**15, "5,000 TB"),
    ],
)  # fmt: skip
def test_bytes_are_shown_with_three_digits(count: int, expected: str) -> None:
    assert format_bytes(count) == expected


def test_counts_are_shown_as_parameters_are_quoted() -> None:
    counts = [12, 2_104_000, 104_189_614_848, 2_779_484_478_208]
    assert [format_count(count) for count in counts] == ["12", "2.104M", "104.2B", "2.779T"]
