"""A package that is not installed is one clear line, what it is for and how to get it; never a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import model_in
from unit.operations.made_trials import fill

from autofit.core import distribution
from autofit.operations import doctor
from autofit.store import Store
from autofit.trial.machine.detection import detect

TESTS = Path(__file__).parents[2]
JOB = ("--model", "smollm2-135m", "--seq-len", "32", "--global-batch", "1")
SEARCH = ("search", *JOB, "--store", "store.db", "--max-trials", "1")


def run_without(package: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The program where `package` is not installed, run in `folder`."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "without"), str(TESTS.parent)]),
        "AUTOFIT_TEST_WITHOUT": package,
    }
    command = [sys.executable, "-m", "autofit.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.parametrize(
    ("package", "words", "code", "message"),
    [
        ("ray", SEARCH, 4, "autofit: ray is not installed here (pip install autofit-llm, or use --in-place)"),
        ("optuna", (*SEARCH, "--in-place"), 4, "autofit: optuna is not installed here (pip install autofit-llm)"),
        ("torch", SEARCH, 4, "autofit: torch is not installed (pip install autofit-llm)"),
        ("transformers", SEARCH, 4, "autofit: transformers is not installed (pip install autofit-llm)"),
    ],
)
def test_what_a_search_needs(tmp_path: Path, package: str, words: tuple[str, ...], code: int, message: str) -> None:
    done = run_without(package, tmp_path, *words)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, message)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("package", "config"),
    [("peft", "method=lora"), ("bitsandbytes", "method=qlora"), ("bitsandbytes", "method=full,optimizer=adamw-8bit")],
)
def test_what_a_config_needs(tmp_path: Path, package: str, config: str) -> None:
    done = run_without(package, tmp_path, "trial", *JOB, "--config", config)
    assert done.returncode == 2
    assert f"needs {package}, which is not installed here (pip install autofit-llm)" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("package", "remedy"),
    [("mlflow", "'autofit-llm[trackers]'"), ("wandb", "'autofit-llm[trackers]'"), ("optuna", "autofit-llm")],
)
def test_what_a_tracker_needs(tmp_path: Path, package: str, remedy: str) -> None:
    with Store.open(str(tmp_path / "store.db")) as store:
        fill(store)
    done = run_without(package, tmp_path, "track", package, "--store", "store.db")
    assert (done.returncode, done.stderr) == (4, f"autofit: {package} is not installed here (pip install {remedy})\n")


def test_a_trial_goes_without_what_its_config_does_not_need(tmp_path: Path) -> None:
    model_in(tmp_path / "small")
    words = ("trial", *JOB, "--model", "small", "--config", "method=full", "--json")
    done = run_without("peft,bitsandbytes,deepspeed", tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"] == "fits"


def test_the_self_test_needs_only_what_trains(tmp_path: Path) -> None:
    lacking = "ray,optuna,sqlalchemy,alembic,bitsandbytes,deepspeed"
    hidden = f"{lacking},SQLAlchemy"  # the name in its metadata
    done = run_without(hidden, tmp_path, *["doctor", "--self-test", "--device", "cpu", "--time-limit", "1s", "--json"])
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(lacking.split(",")) <= set(document["absent"])
    assert document == json.loads((tmp_path / "autofit-self-test.json").read_text())
    # On a slow machine the first trial has begun by then, and is cut.
    assert re.search(r"not run   precision=fp32: (the time limit was reached|cut by the time limit)", done.stderr)


def test_the_doctor_looks_for_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: None)
    hardware, stack = detect("cpu")
    checks = {c.name: c for c in doctor.libraries(hardware, stack, offload=False)}
    assert (checks["optuna"].state, checks["optuna"].remedy) == ("missing", "pip install autofit-llm")


def test_the_doctor_installs_flash_attn_with_the_torch_that_is_there() -> None:
    hardware, stack = detect("cpu")
    hardware, stack = replace(hardware, kind="cuda"), replace(stack, flash_attn=None)
    checks = {c.name: c for c in doctor.libraries(hardware, stack, offload=False)}
    # flash-attn's build imports torch, which an isolated one lacks
    assert checks["flash_attn"].remedy == "pip install --no-build-isolation 'autofit-llm[flash]'"


def test_remedies_name_what_pyproject_has() -> None:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    assert project["name"] == distribution.NAME
    named = re.findall(
        r"""\binstall\(["'](\w+)""", "".join(map(Path.read_text, (TESTS.parent / "autofit").rglob("*.py")))
    )
    assert {"cuda", "flash", "bench", "trackers"} == set(named) <= set(project["optional-dependencies"])


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A folder where PyAutoFit's metadata is, as pip leaves it."""
    folder = tmp_path / "autofit-2024.11.13.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: autofit\nVersion: 2024.11.13.2\n")
    return tmp_path


def test_a_package_of_the_same_name_is_said(stranger: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(stranger), str(TESTS.parent)])}
    command = [sys.executable, "-m", "autofit", "hardware", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and json.loads(done.stdout)
    (line,) = done.stderr.splitlines()
    assert line.startswith("autofit: PyAutoFit 2024.11.13.2 is installed here, too: ")
    assert line.endswith("(pip uninstall --yes autofit && pip install --force-reinstall --no-deps autofit-llm)")


def test_the_doctor_says_it_too(stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._package().state == "ok"
    monkeypatch.syspath_prepend(stranger)
    check = doctor._package()
    assert (check.name, check.state) == ("autofit", "missing")
    assert "PyAutoFit 2024.11.13.2" in check.found and check.remedy.startswith("pip uninstall")


def test_this_package_under_its_former_name_is_no_stranger(stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stranger / "autofit-2024.11.13.2.dist-info" / "entry_points.txt").write_text(
        "[console_scripts]\nautofit = autofit.cli.main:main\n"
    )
    monkeypatch.syspath_prepend(stranger)
    assert distribution.stranger() is None
