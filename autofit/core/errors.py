"""Errors that users see, each kind with the exit code that scripts rely on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any


class AutofitError(Exception):
    """An error with one clear line for the user; `exit_code` is the process's exit status."""

    exit_code = 1


class UsageError(AutofitError):
    """The request is wrong: unknown name, bad unit, impossible combination."""

    exit_code = 2


class NothingFits(AutofitError):
    """No config of the search fits; the message says what came closest and which lever would help."""

    exit_code = 3


class Shortfall(NothingFits):
    """No config fits `memory_limit_bytes`; `closest` is the config that came closest to it, None if none was tried.

    Its `over_limit_bytes` is None if neither the failed trial nor its prediction shows how much it lacked.
    """

    def __init__(self, message: str, *, memory_limit_bytes: int, closest: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.memory_limit_bytes = memory_limit_bytes
        self.closest = closest

    def to_json(self) -> dict[str, Any]:
        """The JSON object that is given in place of an answer."""
        return {"outcome": "nothing_fits", "reason": str(self), **self.facts()}

    def facts(self) -> dict[str, Any]:
        """The limit and what came closest, as JSON values."""
        closest = None if self.closest is None else dict(self.closest)
        return {"memory_limit_bytes": self.memory_limit_bytes, "closest": closest}


class EnvironmentLacks(AutofitError):
    """Something the request needs is missing here: `message` says what, `remedy` the command or step that fixes it."""

    exit_code = 4

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(f"{message} ({remedy})")
        self.message = message
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers send it to the driver."""
        return partial(type(self), remedy=self.remedy), (self.message,)


def in_one_line(error: BaseException) -> str:
    """The type of `error` and the first line of its message: torch's messages go on with C++ stacks."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def lines_of(text: str | BaseException, otherwise: str | None = None) -> list[str]:
    """The lines of a text, or of an error's message, that are not blank. Where there is none, one line: `otherwise`, or
    the type of `text`."""
    lines = [stripped for line in str(text).splitlines() if (stripped := line.strip())]
    return lines or [type(text).__name__ if otherwise is None else otherwise]


class StoreError(EnvironmentLacks):
    """The store cannot be used: locked, read-only, corrupt, unreachable, or of a newer schema."""


class NotMeasured(EnvironmentLacks):
    """No trial in the store answers the question; the remedy is a search."""


class Interrupted(AutofitError):
    """The user stopped the command; everything measured so far is stored."""

    exit_code = 130


def spelled(value: object) -> str:
    """A value as users write it: true and false in small letters."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def unknown(kind: str, given: object, valid: Iterable[object]) -> UsageError:
    """The error for a name that is not one of `valid`: it suggests the nearest ones, or lists all if there are few."""
    names = [spelled(name) for name in valid]
    similar = difflib.get_close_matches(str(given).lower(), names, n=3, cutoff=0.5)
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    elif len(names) <= 12:
        hint = f"valid: {', '.join(names)}" if names else "there are none"
    else:
        hint = f"valid: {', '.join(names[:12])}, ..."
    return UsageError(f"unknown {kind} {given!r}: {hint}")
