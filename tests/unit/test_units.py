"""Sizes and durations: exact where they parse, helpful where they do not."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import UsageError
from autofit.core.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
    parse_tokens,
)

FACTORS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        (" 512mib ", 2**29),
        ("7b", 7),
        ("0.1GB", 10**8),
        ("1.1TB", 1_100_000_000_000),
        ("141.312GB", 141_312_000_000),
        # beyond the integers that a float holds
        ("9007199254740993B", 9_007_199_254_740_993),
        ("8.000000000000000001TB", 8_000_000_000_000),
        ("1.9999B", 1),
    ],
)
def test_a_size_parses_exactly(text: str, size: int) -> None:
    assert parse_bytes(text) == size


NOT_UNDERSTOOD = (
    *(
        "",
        " ",
        "GiB",
        "-1GiB",
        "+1GiB",
        "24 GiBs",
        "24G",
        "1e3GB",
        "nanGB",
        "infGB",
        "1,5GiB",
        "1.GiB",
        ".5GiB",
        "1 2GB",
    ),
    "1\N{ARABIC-INDIC DIGIT THREE}GiB",
)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        *((bare, rf"no unit: did you mean {bare.strip()}GiB\?") for bare in ("24", "1.5", " 80 ")),
        *((text, "not understood: .*24GiB") for text in NOT_UNDERSTOOD),
        *((text, "is zero") for text in ("0GiB", "0.0MB", "0.4B")),
    ],
)
def test_what_is_no_size_is_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        parse_bytes(text)


@given(st.integers(1, 10**15), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " ", "  "]))
def test_whole_sizes_parse_exactly(number: int, unit: str, gap: str) -> None:
    assert parse_bytes(f"{number}{gap}{unit}") == number * FACTORS[unit]
    assert parse_bytes(f"{number}{unit.upper()}") == parse_bytes(f"{number}{unit.lower()}")


@given(st.decimals(1, 10**6, places=9), st.sampled_from(sorted(FACTORS)))
def test_decimal_sizes_lose_only_the_fraction_of_a_byte(number: Decimal, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == int(Fraction(number) * FACTORS[unit])


@given(st.integers(1, 2**50))
def test_a_printed_size_parses_to_what_its_digits_can_say(size: int) -> None:
    printed = format_bytes(size)
    digit = FACTORS[printed.split()[1]] / (100 if "." in printed else 1)
    assert abs(parse_bytes(printed) - size) <= digit / 2 + 1


@pytest.mark.parametrize(
    ("size", "printed"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (5 * MIB, "5 MiB"),
        (1546188227, "1.44 GiB"),
        (2 * TIB, "2.00 TiB"),
        (-3 * GIB, "-3.00 GiB"),
    ],
)
def test_sizes_are_printed_in_binary_units(size: int, printed: str) -> None:
    assert format_bytes(size) == printed


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("10m", 600.0),
        ("10M", 600.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("0.1s", 0.1),
        ("2d", 172800.0),
        ("1h0m1s", 3601.0),
        (" 5 m ", 300.0),
    ],
)
def test_a_duration_parses_exactly(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


NO_DURATIONS = "", "m", "10x", "10min", "1h 30", "-5m", "1h-30m", "ten minutes", "5m!", "\N{ARABIC-INDIC DIGIT THREE}m"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        *((bare, rf"no unit: did you mean {bare}m \(minutes\) or {bare}s") for bare in ("10", "0.5")),
        *((text, "not understood: .*1h30m") for text in NO_DURATIONS),
        *((text, "is zero") for text in ("0s", "0h0m", "0.0ms")),
        *((text, "more than a year") for text in ("367d", "9" * 30 + "h")),
    ],
)
def test_what_is_no_duration_is_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        parse_duration(text)


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59), st.integers(1, 999))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int, milliseconds: int) -> None:
    total = Fraction(hours * 3600 + minutes * 60 + seconds) + Fraction(milliseconds, 1000)
    assert parse_duration(f"{hours}h{minutes}m{seconds}s{milliseconds}ms") == float(total)


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [
        (0.0, "0.0 s"),
        (0.04, "40 ms"),
        (0.05, "0.1 s"),
        (0.44, "0.4 s"),
        (12.4, "12 s"),
        (59.7, "1 m 00 s"),
        (185, "3 m 05 s"),
        (3599.6, "1 h 00 m"),
        (3725, "1 h 02 m"),
        (90_000, "25 h 00 m"),
        (388_800, "4.5 d"),
    ],
)
def test_durations_are_printed_for_people(seconds: float, printed: str) -> None:
    assert format_duration(seconds) == printed


@given(st.floats(1, 10**6))
def test_a_printed_duration_parses_to_what_its_digits_can_say(seconds: float) -> None:
    printed = format_duration(seconds)
    digit = 8640 if " d" in printed else 60 if " h " in printed else 0.1 if "." in printed else 1
    assert abs(parse_duration(printed) - seconds) <= digit


@pytest.mark.parametrize(
    ("text", "tokens"), [("7", 7), ("500M", 5 * 10**8), ("1.5B", 15 * 10**8), (" 2 t ", 2 * 10**12), ("0.1k", 100)]
)
def test_a_number_of_tokens_is_in_thousands(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "many", "-1M", "1.5G", "0", "0.1", "1e9"])
def test_a_number_of_tokens_that_is_not_understood_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="such as 500M"):
        parse_tokens(text)
