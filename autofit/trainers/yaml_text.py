"""Edits of YAML text in place: only the lines of the keys that change are touched, so comments and order survive."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

from autofit.trainers.edits import REMOVED, Edits, KeyPath


def edited_text(text: str, edits: Edits) -> str | None:
    """`text` with the edits made one after another; None for YAML that is written in a way this cannot edit.

    New keys follow the key that was edited before them, or come last.
    """
    last: str | None = None
    for path, value in edits.items():
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode) or root.flow_style:
            return None
        made = _without(text, root, path) if value is REMOVED else _with(text, root, path, value, last)
        if made is None:
            return None
        text, last = made, last if value is REMOVED else path[0]
    return text


def _with(text: str, root: yaml.MappingNode, path: KeyPath, value: Any, last: str | None) -> str | None:
    """`text` with one key set: its value replaced, or a line added to the nearest mapping that is there."""
    mapping, depth = root, 0
    while (entry := _entry(mapping, path[depth])) is not None:
        key, node = entry
        rest = path[depth + 1 :]
        if rest and isinstance(node, yaml.MappingNode) and node.value:
            mapping, depth = node, depth + 1
            continue
        for name in reversed(rest):
            value = {name: value}
        return _replaced(text, key, node, value)
    for name in reversed(path[depth + 1 :]):
        value = {name: value}
    return _added(text, mapping, path[depth], value, last if mapping is root else None)


def _replaced(text: str, key: yaml.Node, node: yaml.Node, value: Any) -> str:
    end = _end(node)
    if not isinstance(value, dict) and isinstance(node, yaml.ScalarNode) and node.value != "":
        return text[: node.start_mark.index] + _flow(value) + text[end:]
    colon = text.index(":", key.end_mark.index)
    rest = text[max(end, colon + 1) :]
    comment, newline, following = rest.partition("\n")
    said = _after_colon(value, key.start_mark.column)
    line = f"{comment}{said}" if said.startswith("\n") else f"{said}{comment}"
    return text[: colon + 1] + line + newline + following


def _added(text: str, mapping: yaml.MappingNode, name: str, value: Any, last: str | None) -> str | None:
    if mapping.flow_style:
        inside = mapping.end_mark.index - 1
        comma = ", " if mapping.value else ""
        return f"{text[:inside]}{comma}{name}: {_flow(value)}{text[inside:]}"
    key, node = _nearest(mapping, name) or (_entry(mapping, last) if last is not None else None) or mapping.value[-1]
    column = mapping.value[0][0].start_mark.column
    end = text.find("\n", max(_end(node), key.end_mark.index))
    head, tail = (text + "\n", "") if end < 0 else (text[: end + 1], text[end + 1 :])
    return f"{head}{' ' * column}{name}:{_after_colon(value, column)}\n{tail}"


def _nearest(mapping: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    """The last of the entries whose names begin with most of the same words; None where none shares the first."""
    words = name.split("_")
    alike = {key.value: _in_common(str(key.value).split("_"), words) for key, _ in mapping.value}
    most = max(alike.values())
    return _entry(mapping, [key for key, same in alike.items() if same == most][-1]) if most else None


def _in_common(words: list[str], others: list[str]) -> int:
    pairs = list(zip(words, others, strict=False))
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))


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
        key, last = node.value[-1] if isinstance(node, yaml.MappingNode) else (None, node.value[-1])
        if key is not None and isinstance(last, yaml.ScalarNode) and last.value == "":
            return int(key.end_mark.index) + 1
        return _end(last)
    return int(node.end_mark.index)


def _flow(value: Any) -> str:
    said = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return said.removesuffix("...\n").strip()


def _after_colon(value: Any, column: int) -> str:
    if isinstance(value, Mapping) and value:
        block = yaml.safe_dump(dict(value), width=10**6, allow_unicode=True, sort_keys=False).rstrip("\n")
        return "\n" + textwrap.indent(block, " " * (column + 2))
    return " " + _flow(value)
