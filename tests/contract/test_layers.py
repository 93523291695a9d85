"""The house's order: imports go downward only, heavy libraries stay in their rooms and are loaded when used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from unit.operations.made_trials import fill

import autofit
from autofit import operations
from autofit.store import Store

ROOT = Path(autofit.__file__).parent

VALUES = {"core"}
"""The ground floor: standard library and each other only."""
FLOORS: tuple[set[str], ...] = (
    VALUES,
    {"catalog", "client"},
    {"techniques"},
    {"training"},
    {"estimate"},
    {"trial"},
    {"probe"},
    {"store", "export", "trackers"},
    {"trainers", "workers"},
    {"planning"},
    {"prediction"},
    {"search"},
    {"operations"},
    {"bench"},
    {"cli", "api"},
    {"__main__", ""},
)
"""From the bottom up. Rooms of one floor do not import each other, the ground floor's apart. The last has the package
itself, which names what users import."""
STAIRS = {("autofit.cli.commands.serve", "autofit.api.server")}
"""Imports on one floor that are meant: the command that starts the server."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
OWNERS = {
    **{"optuna": {"search", "bench", "trackers"}, "mlflow": {"trackers"}, "wandb": {"trackers"}},
    **{"ray": {"workers"}, "sqlalchemy": {"store"}, "alembic": {"store"}},
}
"""Libraries that only these rooms may import: Optuna's samplers are also what our search is compared with, and its
journal is what its dashboard reads."""
HEAVY = ("torch", "transformers", "ray", "optuna", "peft", "plotly", "matplotlib", "fastapi", "mlflow", "wandb")
FOR_ANSWERS = ("pydantic", "yaml", "sqlalchemy", "platformdirs", "rich", "numpy")
"""Libraries that commands need which answer; the help needs none but the one that parses the command line."""
COMMAND = """
import sys
from autofit.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
print("loaded:", *sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr)
"""
"""Runs the program with the arguments that follow, and says what it has loaded at its end."""


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


@cache
def statements() -> list[Import]:
    return [statement for module, path in FILES.items() for statement in imports(module, path)]


def own() -> list[Import]:
    return [statement for statement in statements() if statement.imported.split(".")[0] == "autofit"]


def foreign() -> list[Import]:
    ours = (*sys.stdlib_module_names, "autofit")
    return [statement for statement in statements() if statement.imported.split(".")[0] not in ours]


def room(module: str) -> str:
    """The folder or file directly under `autofit` that holds a module; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def test_every_room_has_its_floor() -> None:
    rooms = {room(module) for module in FILES}
    assert rooms == set(FLOOR)


def test_imports_go_downward_only() -> None:
    wrong = []
    for statement in own():
        here, there = room(statement.importer), room(statement.imported)
        if here == there or not there or (statement.importer, statement.imported) in STAIRS:
            continue
        within_ground_floor = {here, there} <= VALUES
        if not within_ground_floor and FLOOR[there] >= FLOOR[here]:
            wrong.append(str(statement))
    assert wrong == []


def test_the_stairs_are_used() -> None:
    assert {(statement.importer, statement.imported) for statement in own()} >= STAIRS


def test_space_imports_values_only() -> None:
    assert {room(statement.imported) for statement in own() if statement.importer == "autofit.catalog.space"} <= VALUES


def test_values_need_the_standard_library_only() -> None:
    assert [str(statement) for statement in foreign() if room(statement.importer) in VALUES] == []


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_has_one_owner(library: str) -> None:
    importers = {room(statement.importer) for statement in foreign() if statement.imported.split(".")[0] == library}
    assert importers == OWNERS[library]


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {module: set() for module in FILES}
    for statement in own():
        if not statement.typing_only and statement.imported != statement.importer:
            graph[statement.importer].add(statement.imported)
    # Modules without anything left to import are taken away until none is left but cycles.
    while leaves := {module for module, needed in graph.items() if not needed & graph.keys()}:
        graph = {module: needed - leaves for module, needed in graph.items() if module not in leaves}
    assert graph == {}


def test_the_python_api_loads_no_heavy_library() -> None:
    code = f"from autofit.operations import *; import sys; print(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_package_itself_is_as_light_as_its_version() -> None:
    """`autofit --help` imports it, and so does everything else."""
    code = "import autofit, sys; print(*sorted(name for name in sys.modules if name.startswith('autofit.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["autofit.estimate", "autofit.search"]


def test_every_operation_is_found_under_its_name() -> None:
    assert not set(operations.__all__) & {path.stem for path in (ROOT / "operations").glob("*.py")}
    for name in operations.__all__:
        assert getattr(operations, name) is vars(operations)[name]


@pytest.mark.parametrize(
    ("arguments", "spared"),
    [
        (("--help",), {*HEAVY, *FOR_ANSWERS}),
        (("recommend", "--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4"), {*HEAVY, "numpy"}),
    ],
)
def test_a_command_spares_the_libraries_that_it_does_not_need(
    arguments: tuple[str, ...], spared: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes time before a command's first word is what it imports."""
    monkeypatch.setenv("AUTOFIT_STORE", str(tmp_path / "store.db"))
    with Store.open(str(tmp_path / "store.db")) as store:
        fill(store)
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr
    loaded = set(done.stderr.partition("loaded:")[2].split())
    assert "autofit" in loaded and not loaded & spared
