"""A trainer's file as the user wrote it: its text, its keys, and the text with some of them changed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.core.errors import UsageError
from autofit.trainers.edits import Edits, applied
from autofit.trainers.yaml_text import edited_text


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file; nothing in it is trusted before a trainer's reader has read it."""

    name: str
    text: str
    values: Mapping[str, Any] = field(hash=False)

    @classmethod
    def read(cls, path: Path) -> SourceFile:
        """Raises `UsageError` for what is not one mapping of keys, in YAML or JSON."""
        try:
            if path.stat().st_size > 4 * 2**20:
                raise UsageError(f"{path} is too large for a trainer's config")
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not text: a trainer's config is YAML or JSON") from error
        return cls.of(str(path), text)

    @classmethod
    def of(cls, name: str, text: str) -> SourceFile:
        """The file with this text; raises as `read` does."""
        try:
            values = json.loads(text) if _is_json(text) else _yaml(name, text)
        except ValueError as error:
            raise UsageError(f"{name} is not JSON: {error}") from error
        except RecursionError as error:
            raise UsageError(f"{name} is no trainer's config: it is nested too deeply") from error
        if values is None:
            raise UsageError(f"{name} is empty")
        if not isinstance(values, dict):
            kind = "a list" if isinstance(values, list) else "plain text"
            raise UsageError(f"{name} holds {kind}: a trainer's config has a key and a value on each line")
        return cls(name=name, text=text, values={str(key): value for key, value in values.items()})

    def changed(self, edits: Edits) -> str | None:
        """The text with the edits made, comments and order kept; None where that cannot be done exactly."""
        values = applied(self.values, edits)
        if _is_json(self.text):
            indent = next((len(line) - len(line.lstrip()) for line in self.text.splitlines()[1:] if line.strip()), None)
            dumped = json.dumps(values, indent=indent, ensure_ascii=False)
            return dumped + "\n" if self.text.endswith("\n") else dumped
        edited = edited_text(self.text, edits)
        return edited if edited is not None and _parses_to(edited, values) else None

    def diff(self, changed: str) -> str:
        """A unified diff from the file to `changed`, for `patch`. Of JSON in one line, a diff by keys for a reader, and
        it says so: both are printed as `python -m json.tool` does."""
        texts, name = [self.text, changed], self.name
        if _is_json(self.text) and "\n" not in self.text.strip():
            texts = [json.dumps(json.loads(text), indent=4) + "\n" for text in texts]
            name += " (as python -m json.tool prints it)"
        before, after = (text.splitlines(keepends=True) for text in texts)
        lines = [
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(before, after, fromfile=name, tofile=name, n=1)
        ]
        return "".join(lines)


def _is_json(text: str) -> bool:
    return text.lstrip().startswith("{") and text.rstrip().endswith("}") and '"' in text


def _yaml(name: str, text: str) -> Any:
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"{name} is not YAML: {problem}") from error
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise UsageError(f"{name} has {twice} twice: trainers take the last, so take one out")
    return values


def _parses_to(text: str, values: Mapping[str, Any]) -> bool:
    import yaml

    try:
        return bool(yaml.safe_load(text) == values)
    except yaml.YAMLError:
        return False
