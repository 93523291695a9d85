"""Answers about a config.json, kept between processes: to ask transformers again takes seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

ANSWERS_VERSION = 5
"""Incremented when `architecture_file.parse`, `model_shape.measure` or `loss_check.why_another_loss`, with the losses
that it compares, answers otherwise: kept answers are then not used."""


def cache_folder() -> Path:
    """`AUTOFIT_CACHE` or, without it, the user's cache folder. What is in it may be deleted at any time."""
    return Path(os.environ.get("AUTOFIT_CACHE") or user_cache_path("autofit"))


def write_cache_file(file: Path, content: bytes) -> None:
    """Write or replace a file of the cache: other processes see it whole or not at all. Raises `OSError`."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(file)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def cached_answer(question: str, text: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer that `find` returns, a JSON object. It is called once for this `text` and the installed transformers.
    `question` names what it answers. A cache that fails costs the call, never an answer."""
    key = sha256("\0".join((question, str(ANSWERS_VERSION), installed("transformers"), text)).encode()).hexdigest()
    file = cache_folder() / "models" / f"{key}.json"
    with suppress(OSError, ValueError):
        answer = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(answer, dict):
            return answer
    answer = find()
    with suppress(OSError, TypeError):  # a full disk, a folder of another user, or what JSON cannot hold
        write_cache_file(file, json.dumps(answer).encode())
    return answer


@cache
def installed(package: str) -> str:
    """The version of a package; an empty string without it."""
    with suppress(PackageNotFoundError):
        return version(package)
    return ""
