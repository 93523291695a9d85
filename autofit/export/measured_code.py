"""The code that was measured, as text: a script that copies it cannot differ from what ran."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
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


def excerpt(module: str, name: str) -> Excerpt:
    """The definition of `name` in `module`, with all module-level names that it refers to; no module is imported."""
    needed_imports: set[str] = set()
    blocks: list[str] = []
    visited: set[tuple[str, str]] = set()

    def take(module: str, name: str) -> None:
        definitions, imports = _read(module)
        if (module, name) in visited:
            return
        visited.add((module, name))
        if name in definitions:
            source, used_names = definitions[name]
            for used in used_names:
                take(module, used)
            blocks.append(source)
        elif name in imports:
            origin = imports[name].split()[1]
            if origin.partition(".")[0] == _PACKAGE:
                take(origin, name)
            else:
                needed_imports.add(imports[name])

    take(module, name)
    assert blocks, f"{module} does not define {name}"
    return Excerpt(imports=tuple(sorted(needed_imports)), code="\n\n\n".join(blocks) + "\n")


@cache
def _read(module: str) -> tuple[dict[str, tuple[str, list[str]]], dict[str, str]]:
    """For each name that a module defines, the source and the names in it; for each that it imports, the statement."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    lines, body = text.splitlines(), ast.parse(text).body
    definitions: dict[str, tuple[str, list[str]]] = {}
    imports: dict[str, str] = {}
    for_checkers = [inner for node in body if isinstance(node, ast.If) for inner in node.body]
    for node in body + for_checkers:
        match node:
            case ast.Import(names=names):
                imports |= {alias.name: f"import {alias.name}" for alias in names}
            case ast.ImportFrom(module=str(origin), names=names):
                imports |= {alias.name: f"from {origin} import {alias.name}" for alias in names}
            case (
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Assign(targets=[ast.Name(id=name)])
                | ast.AnnAssign(target=ast.Name(id=name))
            ):
                first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
                source = _FOR_CHECKERS.sub("", "\n".join(lines[first - 1 : node.end_lineno]))
                used_names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
                definitions[name] = source, sorted(used_names)
    return definitions, imports
