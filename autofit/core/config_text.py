"""A config as one line of text: `axis=value,axis=value`."""

from __future__ import annotations

import re

from autofit.core.errors import UsageError


def pairs(text: str) -> dict[str, str]:
    """The value that `text` gives each name; a comma may end it. Raises `UsageError` naming what is not understood."""
    parts = [part.strip() for part in text.split(",")]
    if not parts[-1]:
        parts.pop()
    values: dict[str, str] = {}
    for part, after in zip(parts, [None, *parts], strict=False):
        name, value = _pair(part, after)
        if name in values:
            raise UsageError(f"config names {name} twice")
        values[name] = value
    return values


def _pair(part: str, after: str | None) -> tuple[str, str]:
    if not part:
        where = "before its first comma" if after is None else f"between two commas, after {after!r}"
        raise UsageError(f"config has nothing {where}")
    name, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals:
        raise UsageError(f"config {part!r} is not understood: write axis=value, such as micro_batch=4")
    if "=" in value:
        raise UsageError(f"config {part!r} is not understood: separate with commas, as in {_with_commas(part)}")
    return name, value


def _with_commas(text: str) -> str:
    """Pairs that something else separates, as they should have been written."""
    return re.sub(r"[\s;]+(?=[^\s;=]+=)", ",", re.sub(r"\s*=\s*", "=", text))
