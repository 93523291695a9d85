"""Benchmark scripts go with the package, and what they record says when, on what and with which versions it was."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py"))
RECORDING = sorted(path.name for path in BENCHMARKS.glob("*.py") if 'add_argument("--out"' in path.read_text())


@pytest.mark.parametrize("script", RECORDING)
def test_a_script_that_records_writes_the_date(script: str) -> None:
    assert '"recorded_at": datetime.now(UTC)' in (BENCHMARKS / script).read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_script_takes_from_the_package_is_there(script: str) -> None:
    imports = [node for node in ast.parse((BENCHMARKS / script).read_text()).body if isinstance(node, ast.ImportFrom)]
    for node in (node for node in imports if str(node.module).startswith("autofit")):
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            submodule = importlib.util.find_spec(f"{node.module}.{alias.name}") if hasattr(module, "__path__") else None
            assert hasattr(module, alias.name) or submodule is not None, alias.name
