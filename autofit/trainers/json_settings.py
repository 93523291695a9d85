"""The value of a key that takes a mapping: some trainers also take it as JSON text, or as the name of a JSON file."""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping
from typing import Any

from autofit.core.errors import UsageError
from autofit.trainers.run import Where

_TAKE_TEXT = ("deepspeed", "fsdp_config", "gradient_checkpointing_kwargs")
"""Keys whose settings a file may hold as JSON text or, but for the last, in a file of their own."""


def settings_in_text(values: Mapping[str, Any], where: Where) -> dict[str, Mapping[str, Any]]:
    """The settings that a trainer's file with these keys holds as text or in other files, by key."""
    texts = {name: values[name] for name in _TAKE_TEXT if isinstance(values.get(name), str)}
    settings = {name: settings_of(name, text, where) for name, text in texts.items()}
    return {name: mapping for name, mapping in settings.items() if mapping is not None}


def settings_of(name: str, value: object, where: Where | None = None) -> Mapping[str, Any] | None:
    """The mapping that the key `name` holds as itself or as JSON text, which begins with a brace (transformers'
    training_args.py). With `where`, any other text names a file beside the user's own or in a folder above it.

    None for what is no mapping, and for a file that is not here. Raises `UsageError` for what is not JSON.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parsed(value, name)
    elif isinstance(value, str) and where is not None:
        value = _in_file(value, where)
    return value if isinstance(value, dict) else None


def _in_file(file: str, where: Where) -> object:
    for path in (where.folder / file, *(folder / file for folder in where.folder.resolve().parents)):
        if os.path.isfile(path):  # unlike `Path.is_file`, false of a text that is too long for a name
            try:
                return _parsed(path.read_text(encoding="utf-8-sig"), str(path))
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{path} cannot be read: {error}") from error
    return None


def _parsed(text: str, origin: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin} is not JSON: {error}") from error
