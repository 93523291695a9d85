"""What was found out about a config.json, kept between processes: to ask transformers again takes seconds."""

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

ANSWERS_VERSION = 1
"""Incremented when `architecture_file.parse` or `model_shape.measure` answers otherwise: what was kept is then not
used."""


def cache_folder() -> Path:
    """`AUTOFIT_CACHE` or, without it, the user's cache folder. What is in it may be deleted at any time."""
    return Path(os.environ.get("AUTOFIT_CACHE") or user_cache_path("autofit"))


def keep_file(file: Path, content: bytes) -> None:
    """Write a file of the cache, in place of any there: others find it whole or not at all. Raises `OSError`."""
    whole = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole.write_bytes(content)
        whole.replace(file)
    finally:
        with suppress(OSError):
            whole.unlink(missing_ok=True)


def kept(what: str, given: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `find` returns, a JSON object; called once for this text `given` and the installed transformers. `what`
    names the question. A cache that fails costs the call, never an answer."""
    key = sha256("\0".join((what, str(ANSWERS_VERSION), _transformers(), given)).encode()).hexdigest()
    file = cache_folder() / "models" / f"{key}.json"
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    found = find()
    with suppress(OSError, TypeError):  # a full disk, a folder of another user, or what JSON cannot hold
        keep_file(file, json.dumps(found).encode())
    return found


@cache
def _transformers() -> str:
    with suppress(PackageNotFoundError):
        return version("transformers")
    return ""
