"""A trainer's file as the user wrote it: its text, its keys, and the text with some of them changed."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from autofit.core.errors import UsageError
from autofit.trainers.edits import REMOVED, Edits, KeyPath, applied


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
    try:
        return bool(yaml.safe_load(text) == values)
    except yaml.YAMLError:
        return False


def edited_text(text: str, edits: Edits) -> str | None:
    """`text` with the edits made one after another; None for YAML that is written in a way this cannot edit.

    New keys follow the key that was edited before them, or come last.
    """
    last_key: str | None = None
    for path, value in edits.items():
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode) or root.flow_style:
            return None
        edited = _without(text, root, path) if value is REMOVED else _with_value(text, root, path, value, last_key)
        if edited is None:
            return None
        text, last_key = edited, last_key if value is REMOVED else path[0]
    return text


def _with_value(text: str, root: yaml.MappingNode, path: KeyPath, value: Any, last_key: str | None) -> str | None:
    """`text` with one key set: its value replaced, or a line added to the nearest mapping that is there."""
    mapping, depth = root, 0
    while (entry := _entry(mapping, path[depth])) is not None:
        key, node = entry
        inner_path = path[depth + 1 :]
        if inner_path and isinstance(node, yaml.MappingNode) and node.value:
            mapping, depth = node, depth + 1
            continue
        for name in reversed(inner_path):
            value = {name: value}
        return _replaced(text, key, node, value)
    for name in reversed(path[depth + 1 :]):
        value = {name: value}
    return _added(text, mapping, path[depth], value, last_key if mapping is root else None)


def _replaced(text: str, key: yaml.Node, node: yaml.Node, value: Any) -> str:
    end = _end(node)
    if not isinstance(value, dict) and isinstance(node, yaml.ScalarNode) and node.value != "":
        return text[: node.start_mark.index] + _flow(value) + text[end:]
    colon = text.index(":", key.end_mark.index)
    tail = text[max(end, colon + 1) :]
    comment, newline, following = tail.partition("\n")
    written = _after_colon(value, key.start_mark.column)
    line = f"{comment}{written}" if written.startswith("\n") else f"{written}{comment}"
    return text[: colon + 1] + line + newline + following


def _added(text: str, mapping: yaml.MappingNode, name: str, value: Any, last_key: str | None) -> str | None:
    if mapping.flow_style:
        brace = mapping.end_mark.index - 1
        comma = ", " if mapping.value else ""
        return f"{text[:brace]}{comma}{name}: {_flow(value)}{text[brace:]}"
    key, node = (
        _nearest(mapping, name) or (_entry(mapping, last_key) if last_key is not None else None) or mapping.value[-1]
    )
    column = mapping.value[0][0].start_mark.column
    end = text.find("\n", max(_end(node), key.end_mark.index))
    head, tail = (text + "\n", "") if end < 0 else (text[: end + 1], text[end + 1 :])
    return f"{head}{' ' * column}{name}:{_after_colon(value, column)}\n{tail}"


def _nearest(mapping: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    """The last of the entries whose names begin with most of the same words; None where none shares the first."""
    words = name.split("_")
    pairs = {key.value: zip(str(key.value).split("_"), words, strict=False) for key, _ in mapping.value}
    counts = {key: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs[key])) for key in pairs}
    most = max(counts.values())
    return _entry(mapping, [key for key, count in counts.items() if count == most][-1]) if most else None


def _without(text: str, root: yaml.MappingNode, path: KeyPath) -> str | None:
    mapping: yaml.Node = root
    entry = None
    for name in path:
        entry = _entry(mapping, name) if isinstance(mapping, yaml.MappingNode) else None
        if entry is None:
            return text
        parent, mapping = mapping, entry[1]
    assert entry is not None and isinstance(parent, yaml.MappingNode)
    if parent.flow_style or len(parent.value) == 1:
        return None
    key, node = entry
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    end = text.find("\n", max(_end(node), key.end_mark.index))
    return text[:start] + ("" if end < 0 else text[end + 1 :])


def _entry(mapping: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    return next(((key, node) for key, node in mapping.value if key.value == name), None)


def _end(node: yaml.Node) -> int:
    """Where a node's text ends; a block's own mark is where the next token begins, after comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        key, last_node = node.value[-1] if isinstance(node, yaml.MappingNode) else (None, node.value[-1])
        if key is not None and isinstance(last_node, yaml.ScalarNode) and last_node.value == "":
            return int(key.end_mark.index) + 1
        return _end(last_node)
    return int(node.end_mark.index)


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


def _after_colon(value: Any, column: int) -> str:
    if isinstance(value, Mapping) and value:
        block = yaml.safe_dump(dict(value), width=10**6, allow_unicode=True, sort_keys=False).rstrip("\n")
        return "\n" + textwrap.indent(block, " " * (column + 2))
    return " " + _flow(value)
