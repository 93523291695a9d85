"""The environment of a user's program: the user's own, not that of autofit's step."""

from __future__ import annotations

import json
import os

REPORT_TO = "AUTOFIT_TRIAL"
"""Where a program finds the socket to which it reports: a name of Linux's abstract namespace, which leaves no file."""
OURS = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
"""What trials get that build autofit's own step: they download nothing, and say nothing that is not their own."""
USERS = "AUTOFIT_USERS_ENVIRONMENT"
"""Keeps what the user had in place of these."""


def with_ours() -> dict[str, str]:
    """`OURS`, and what brings the user's own back."""
    return {**OURS, USERS: json.dumps({name: os.environ[name] for name in OURS if name in os.environ})}


def of_program(place: str, threads: int) -> dict[str, str]:
    """The environment of a program that reports to `place` and computes with so many threads."""
    kept = {name: value for name, value in os.environ.items() if name not in (*OURS, USERS)}
    return {
        **kept,
        **json.loads(os.environ.get(USERS, "{}")),
        "OMP_NUM_THREADS": str(threads),  # Ray sets one, and trials side by side share the cores
        REPORT_TO: place,
    }
