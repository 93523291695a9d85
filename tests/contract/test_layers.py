"""The house's order: imports go downward only, heavy libraries stay in their rooms and are loaded when used."""

from __future__ import annotations

import ast
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import autofit
from autofit import operations

ROOT = Path(autofit.__file__).parent

VALUES = {
    "units",
    "errors",
    "workload",
    "lattice",
    "outcome",
    "hardware",
    "frontier",
    "contradiction",
    "repeatability",
    "rendezvous",
}
"""The ground floor: standard library and each other only."""
FLOORS: tuple[set[str], ...] = (
    VALUES,
    {"space"},
    {"catalog"},
    {"techniques"},
    {"training"},
    {"estimate"},
    {"trial"},
    {"store", "export"},
    {"workers"},
    {"search"},
    {"operations"},
    {"cli", "api"},
    {"__main__"},
)
"""From the bottom up. Rooms of one floor do not import each other, the ground floor's apart."""
STAIRS = {("autofit.cli.serve_command", "autofit.api.server")}
"""Imports on one floor that are meant: the command that starts the server."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
OWNERS = {"optuna": {"search"}, "ray": {"workers"}, "sqlalchemy": {"store"}, "alembic": {"store"}}
"""Libraries that one room alone may import."""
HEAVY = ("torch", "transformers", "ray", "optuna", "peft", "plotly", "matplotlib", "fastapi")
HELP_SECONDS = 0.5


@dataclass(frozen=True)
class Import:
    """One import of one module."""

    importer: str
    imported: str
    """The module whose code is meant: for `from package import name`, `package.name` where that is a module."""
    line: int
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_name(path: Path) -> str:
    parts = ("autofit", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(module: str, path: Path) -> Iterator[Import]:
    """Every import of a module, those inside functions included."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute here"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else str(node.module) for name in full]
        else:
            continue
        for name in names:
            yield Import(module, name, node.lineno, id(node) in typing_only)


ALL = [found for module, path in FILES.items() for found in imports(module, path)]
OWN = [found for found in ALL if found.imported.split(".")[0] == "autofit"]
FOREIGN = [found for found in ALL if found.imported.split(".")[0] not in (*sys.stdlib_module_names, "autofit")]


def room(module: str) -> str:
    """The folder or file directly under `autofit` that holds a module; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def test_every_room_has_its_floor() -> None:
    rooms = {room(module) for module in FILES} - {""}
    assert rooms == set(FLOOR)


def test_imports_go_downward_only() -> None:
    wrong = []
    for found in OWN:
        here, there = room(found.importer), room(found.imported)
        if here == there or not there or (found.importer, found.imported) in STAIRS:
            continue
        within_ground_floor = {here, there} <= VALUES
        if not within_ground_floor and FLOOR[there] >= FLOOR[here]:
            wrong.append(str(found))
    assert wrong == []


def test_the_stairs_are_used() -> None:
    assert {(found.importer, found.imported) for found in OWN} >= STAIRS


def test_space_imports_values_only() -> None:
    assert {room(found.imported) for found in OWN if found.importer == "autofit.space"} <= VALUES


def test_values_need_the_standard_library_only() -> None:
    assert [str(found) for found in FOREIGN if room(found.importer) in VALUES] == []


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_has_one_owner(library: str) -> None:
    importers = {room(found.importer) for found in FOREIGN if found.imported.split(".")[0] == library}
    assert importers == OWNERS[library]


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {module: set() for module in FILES}
    for found in OWN:
        if not found.typing_only and found.imported != found.importer:
            graph[found.importer].add(found.imported)
    # Modules without anything left to import are taken away until none is left but cycles.
    while leaves := {module for module, needed in graph.items() if not needed & graph.keys()}:
        graph = {module: needed - leaves for module, needed in graph.items() if module not in leaves}
    assert graph == {}


@pytest.mark.parametrize("statement", ["import autofit.cli.main", "from autofit.operations import *"])
def test_heavy_libraries_are_not_loaded_by(statement: str) -> None:
    code = f"{statement}; import sys; print(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == []


def test_every_operation_is_found_under_its_name() -> None:
    assert sorted(operations._MODULE_OF) == sorted(operations.__all__)
    assert not set(operations.__all__) & {path.stem for path in (ROOT / "operations").glob("*.py")}
    for name in operations.__all__:
        assert getattr(operations, name) is vars(operations)[name]


def seconds_of_help() -> float:
    """Median of five runs."""
    program = [str(Path(sys.executable).with_name("autofit")), "--help"]
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "COLUMNS": "100"})
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def test_help_answers_at_once() -> None:
    # A machine that is busy with something else for a moment deserves another look.
    assert any(seconds_of_help() < HELP_SECONDS for _ in range(4))
