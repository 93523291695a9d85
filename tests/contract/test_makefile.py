"""What `make install` installs, and when it has nothing to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose Python only writes down what it is asked to run."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-cuda.txt"):
        shutil.copy(CHECKOUT / name, tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >>asked\n')
    python.chmod(0o755)
    return tmp_path


def asked(checkout: Path, *words: str) -> list[str]:
    """What `make` has Python run for `words`."""
    log = checkout / "asked"
    log.write_text("")
    command = ["make", *words, "PYTHON=.venv/bin/python"]
    # Without the variables of a make that runs the tests.
    subprocess.run(command, cwd=checkout, env={"PATH": os.environ["PATH"]}, check=True, capture_output=True)
    return log.read_text().splitlines()


def installs(checkout: Path, *words: str) -> list[str]:
    """The extras of each installation that `make` runs for `words`."""
    return [line.partition(" -e ")[2] for line in asked(checkout, *words) if " -e " in line]


def test_what_is_installed_is_not_installed_again(checkout: Path) -> None:
    assert installs(checkout, "install") == ["."]
    assert installs(checkout, "install") == []
    assert installs(checkout, "install", "EXTRAS=") == []


def test_a_search_installs_nothing_for_development(checkout: Path) -> None:
    (checkout / ".venv/bin/autofit").symlink_to("python")
    assert installs(checkout, "search") == ["."]


@pytest.mark.parametrize("target", ["test", "types"])
def test_what_development_needs_is_added(checkout: Path, target: str) -> None:
    (checkout / ".venv/bin/mypy").symlink_to("python")
    installs(checkout, "install")
    assert installs(checkout, target) == [".[dev]"]
    assert installs(checkout, target) == []


def test_extras_that_are_asked_for_later_are_added(checkout: Path) -> None:
    installs(checkout, "test")
    assert installs(checkout, "install", "EXTRAS=cuda,bench") == [".[bench]", ".[cuda]"]
    assert installs(checkout, "install", "EXTRAS=cuda,bench") == []
    assert installs(checkout, "test") == []


def test_another_build_of_torch_and_newer_pins_renew_all(checkout: Path) -> None:
    installs(checkout, "install", "EXTRAS=cuda")
    assert installs(checkout, "install", "TORCH_INDEX=https://example.com/cpu") == [".", ".[cuda]"]
    os.utime(checkout / ".venv/.installed", (0, 0))  # older than the pins
    assert installs(checkout, "test") == [".", ".[cuda]", ".[dev]"]


def test_an_index_of_torch_builds_is_asked_for_torch_alone(checkout: Path) -> None:
    for trainer in ("llamafactory", "axolotl"):
        file = f"tests/exports_in_own_environments/{trainer}.txt"
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / file, checkout / file)
        python = checkout / ".venv/trainers" / trainer / "bin/python"
        python.parent.mkdir(parents=True)
        python.symlink_to(checkout / ".venv/bin/python")
    lines = asked(checkout, "test-exports", "TORCH_INDEX=https://example.com/cpu")
    alone = [line for line in lines if " --index-url " in line]
    assert len(alone) == 3 and all(" --no-deps " in line and "torch==" in line for line in alone)
    assert lines[0].startswith("-c import sys"), "whether this Python will do comes before all that is built with it"
