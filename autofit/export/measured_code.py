"""The code that was measured, as text: a script that copies it cannot differ from what ran."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_PACKAGE = __name__.partition(".")[0]
_FOR_CHECKERS = re.compile(r"  # type: ignore\[[^\]]*\]$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Definitions copied from modules of this package, and the imports they need from elsewhere."""

    imports: tuple[str, ...]
    """Import statements, one name each, sorted."""
    code: str
    """The definitions, each after the ones it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    lines: list[str]
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """For each name, the module it comes from and whether it names that module itself."""

    def text(self, name: str) -> str:
        node = self.definitions[name]
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorators)])
        return "\n".join(self.lines[first - 1 : node.end_lineno])


def excerpt(module: str, name: str) -> Excerpt:
    """The definition of `name` in `module`, with all module-level names that it refers to; no module is imported."""
    imports: set[str] = set()
    blocks: list[str] = []
    visited: set[tuple[str, str]] = set()

    def take(module: str, name: str) -> None:
        if (module, name) in visited:
            return
        visited.add((module, name))
        source = _read(module)
        if name in source.definitions:
            for used in _names(source.definitions[name]):
                take(module, used)
            blocks.append(_FOR_CHECKERS.sub("", source.text(name)))
        elif name in source.imports:
            origin, whole = source.imports[name]
            if origin.partition(".")[0] == _PACKAGE:
                take(origin, name)
            else:
                imports.add(f"import {origin}" if whole else f"from {origin} import {name}")

    take(module, name)
    assert blocks, f"{module} does not define {name}"
    return Excerpt(imports=tuple(sorted(imports)), code="\n\n\n".join(blocks) + "\n")


@cache
def _read(module: str) -> _Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    source = _Module(lines=text.splitlines())
    for node in _statements(ast.parse(text).body):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                source.definitions[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                source.definitions[name] = node
            case ast.Import():
                source.imports.update({alias.name: (alias.name, True) for alias in node.names})
            case ast.ImportFrom(module=str(origin)):
                source.imports.update({alias.name: (origin, False) for alias in node.names})
    return source


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements at module level, including those under an `if`, such as imports for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from node.body


def _names(node: ast.AST) -> list[str]:
    return sorted({child.id for child in ast.walk(node) if isinstance(child, ast.Name)})
