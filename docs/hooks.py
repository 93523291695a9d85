"""Fills the reference pages from the code when MkDocs builds them, so that none of it is written by hand.

`<!-- generated: NAME -->` in a page becomes what the function NAME here returns.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]
MARKER = re.compile(r"<!-- generated: ([\w-]+) -->")
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """MkDocs' event: a page's text before it is rendered."""
    here = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def outside(link: re.Match[str]) -> str:
        """Only files below docs/ are pages; of another file of the repository the site names the path."""
        path = posixpath.normpath(posixpath.join(here, link[2]))
        if path.startswith("docs/"):
            return link[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri} links to {path}, which is not there")
        return f"`{path}`" if path in link[1] else f"{link[1]} (`{path}`)"

    return LINK.sub(outside, MARKER.sub(lambda marker: GENERATED[marker[1]](), markdown))


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def commands() -> Iterator[tuple[str, str]]:
    """Every command's name and what its `--help` prints, as deep as they go."""
    import typer
    from typer.testing import CliRunner

    from autofit.cli.main import app

    waiting: list[tuple[str, Any]] = [("", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop(0)
        shown = CliRunner().invoke(app, [*name.split(), "--help"], prog_name="autofit", terminal_width=100)
        yield f"autofit {name}".strip(), shown.stdout.strip()
        inner = getattr(command, "commands", {})
        waiting[:0] = [(f"{name} {key}".strip(), value) for key, value in inner.items()]


def command_line() -> str:
    return "\n\n".join(f"## {name}\n\n```text\n{text}\n```" for name, text in commands())


def axes() -> str:
    from autofit.techniques import TECHNIQUES

    parts = []
    for technique in TECHNIQUES:
        axis = technique.axis
        rows = [
            (f"`{str(value).lower()}`", axis.effect(value).label, "plain recipe" if value == axis.recipe else "")
            for value in axis.values
        ]
        values = (
            table(("value, lightest first", "changes", ""), rows)
            if rows
            else f"A whole number of at least 1; {axis.recipe} in the plain recipe."
        )
        parts.append(f"## {axis.name}\n\n{inspect.getdoc(technique)}\n\n{values}")
    return "\n\n".join(parts)


def http() -> str:
    from autofit.api.app import create_app
    from autofit.store import Store

    with tempfile.TemporaryDirectory() as folder, Store.open(f"{folder}/store.db") as store:
        document = create_app(store).openapi()
        paths, bodies = document["paths"], document["components"]["schemas"]
    parts = []
    for path, verbs in paths.items():
        for verb, operation in verbs.items():
            rows = (
                (
                    f"`{p['name']}`",
                    "required" if p["required"] else p["schema"].get("default", ""),
                    p.get("description", ""),
                )
                for p in parameters(operation, bodies)
            )
            known = parameters(operation, bodies) and table(("parameter", "default", ""), rows)
            parts.append(f"## {verb.upper()} {path}\n\n{operation['summary']}.\n\n{known or 'It has no parameters.'}")
    return "\n\n".join(parts)


def parameters(operation: dict[str, Any], bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters of a request, the fields of its body among them."""
    found = list(operation.get("parameters", ()))
    for media in operation.get("requestBody", {}).get("content", {}).values():
        body = bodies[media["schema"]["$ref"].rpartition("/")[2]]
        for name, schema in body["properties"].items():
            required = name in body.get("required", ())
            found.append({"name": name, "required": required, "schema": schema, **schema})
    return found


def python() -> str:
    import autofit
    from autofit import operations
    from autofit.client import Client, RemoteSearch

    named = [(f"autofit.{name}", getattr(autofit, name)) for name in autofit.__all__]
    for kind in (Client, RemoteSearch):
        named += [(f"{kind.__name__}.{name}", value) for name, value in vars(kind).items() if name[0] != "_"]
    named += [(f"operations.{name}", getattr(operations, name)) for name in operations.__all__]
    return "\n\n".join(
        f"### {name}\n\n```python\n{name}{inspect.signature(value)}\n```\n\n{inspect.getdoc(value)}"
        for name, value in named
        if inspect.isfunction(value)
    )


GENERATED: dict[str, Callable[[], str]] = {
    "command-line": command_line,
    "axes": axes,
    "http": http,
    "python": python,
}
