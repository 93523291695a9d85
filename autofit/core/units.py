"""Sizes and durations as people write them: parsed exactly, printed readably."""

from __future__ import annotations

import re
from fractions import Fraction

from autofit.core.errors import UsageError

LARGEST_INTEGER = 2**63 - 1
"""The largest signed integer of 64 bits: databases and torch's generators accept no larger one."""
KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

_BYTES = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_SECONDS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600), "d": Fraction(86400)}

_NUMBER = r"(\d{1,30}(?:\.\d{1,30})?)"
"""A number with no more digits than `int` and `float` parse."""
_SIZE = re.compile(rf"{_NUMBER}\s*([A-Za-z]+)", re.ASCII)
_TOKENS = re.compile(rf"{_NUMBER}\s*([kmbt]?)", re.IGNORECASE | re.ASCII)
_BARE = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_PART = re.compile(rf"{_NUMBER}\s*(ms|[smhd])", re.IGNORECASE | re.ASCII)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def parse_bytes(text: str) -> int:
    """Bytes of `text` such as `24GiB` (2**30) or `80GB` (10**9); exact, but a fraction of a byte is dropped. Raises
    `UsageError` for a bare number (`24` could be GiB, GB or bytes), an unknown unit, or an empty or zero size."""
    stripped = text.strip()
    if _BARE.fullmatch(stripped):
        raise UsageError(f"memory size {text!r} has no unit: did you mean {stripped}GiB?")
    match = _SIZE.fullmatch(stripped)
    factor = _BYTES.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"memory size {text!r} is not understood: write a number with GiB, GB, MiB or MB, such as 24GiB"
        )
    size = int(Fraction(match[1]) * factor)
    if size <= 0:
        raise UsageError(f"memory size {text!r} is zero: give a positive size such as 24GiB")
    return size


def as_bytes(size: str | int | None) -> int | None:
    """Bytes of a size that is text (`parse_bytes`), a number of bytes, or None for no limit. Raises `UsageError`."""
    if size is None:
        return None
    if isinstance(size, str):
        return parse_bytes(size)
    if size <= 0:
        raise UsageError(f"memory size {size} is not positive: give bytes, or text such as '24GiB'")
    return int(size)


def is_decimal(text: str) -> bool:
    """Whether a size that `parse_bytes` accepts is in powers of ten, such as `24GB`."""
    return text.strip().lower().endswith(("kb", "mb", "gb", "tb"))


def parse_duration(text: str) -> float:
    """Seconds of `text` such as `90s`, `10m` or `1h30m`. Raises `UsageError` for a bare number, an unknown unit, a zero
    duration, or one of more than a year."""
    stripped = text.strip()
    if _BARE.fullmatch(stripped):
        raise UsageError(f"duration {text!r} has no unit: did you mean {stripped}m (minutes) or {stripped}s (seconds)?")
    parts = list(_PART.finditer(stripped))
    if not parts or "".join("".join(part[0] for part in parts).split()) != "".join(stripped.split()):
        raise UsageError(f"duration {text!r} is not understood: write a number with s, m or h, such as 10m or 1h30m")
    seconds = sum(Fraction(part[1]) * _SECONDS[part[2].lower()] for part in parts)
    if seconds <= 0:
        raise UsageError(f"duration {text!r} is zero: give a positive duration such as 10m")
    if seconds > 366 * 86400:
        raise UsageError(f"duration {text[:20]!r} is more than a year: give one such as 10m or 1h30m")
    return float(seconds)


def as_seconds(duration: str | float) -> float:
    """Seconds of a duration that is text (`parse_duration`) or a number of seconds. Raises `UsageError`."""
    if isinstance(duration, str):
        return parse_duration(duration)
    if not duration > 0:
        raise UsageError(f"duration {duration} is not positive: give seconds, or text such as '10m'")
    return float(duration)


def parse_tokens(text: str) -> int:
    """Tokens of `text` such as `500M` or `1.5B`, in thousands, millions, billions (10**9) and trillions; a bare number
    is itself. Raises `UsageError`."""
    match = _TOKENS.fullmatch(text.strip())
    tokens = int(Fraction(match[1]) * _THOUSANDS[(match[2] or "").lower()]) if match else 0
    if tokens <= 0:
        raise UsageError(f"number of tokens {text[:20]!r} is not understood: write one such as 500M or 1.5B")
    return tokens


def counted(number: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(size: int) -> str:
    """`size` bytes for people, in binary units: `1.44 GiB`."""
    magnitude = abs(size)
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if magnitude >= unit:
            return f"{size / unit:.2f} {name}" if unit >= GIB else f"{size / unit:.0f} {name}"
    return f"{size} B"


def format_duration(seconds: float) -> str:
    """`seconds` for people: `7 ms`, `0.4 s`, `12 s`, `3 m 05 s`, `1 h 02 m`, `4.5 d`."""
    if 0.0005 <= seconds < 0.05:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} m {whole_seconds % 60:02d} s"
    if whole_seconds < 100 * 3600:
        return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} m"
    return f"{whole_seconds / 86400:.1f} d"
