"""The environment of a user's program: the user's own, not that of autofit's step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

REPORT_TO = "AUTOFIT_TRIAL"
"""Where a program finds the socket to which it reports: a name of Linux's abstract namespace, which leaves no file."""
USERS = "AUTOFIT_USERS_ENVIRONMENT"
"""Keeps what the user had in place of what trials of autofit's own step have."""


def keeping_users(ours: Mapping[str, str]) -> dict[str, str]:
    """`ours`, and what brings the user's own back."""
    return {**ours, USERS: json.dumps({name: os.environ.get(name) for name in ours})}


def of_program(place: str, threads: int) -> dict[str, str]:
    """The environment of a program that reports to `place` and computes with so many threads."""
    users: dict[str, str | None] = json.loads(os.environ.get(USERS, "{}"))
    kept = {name: value for name, value in os.environ.items() if name not in (*users, USERS)}
    return {
        **kept,
        **{name: value for name, value in users.items() if value is not None},
        "OMP_NUM_THREADS": str(threads),  # Ray sets one, and trials side by side share the cores
        REPORT_TO: place,
    }
