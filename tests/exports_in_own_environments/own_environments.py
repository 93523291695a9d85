"""Trainers in environments of their own, which `make test-exports` builds."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A trainer's own environment."""

    trainer: str
    python: Path

    def run(self, program: str, *words: object) -> str:
        """What a program beside this file prints, run by the environment's Python. Its failure is the test's."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PYTEST"))},
            **{"PYTHONPATH": str(TESTS / "unit" / "techniques"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
            **{"AXOLOTL_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": "", "NUMBA_DISABLE_JIT": "1"},
        }
        command = [str(word) for word in (self.python, HERE / program, self.trainer, *words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
        return done.stdout


def built(trainer: str) -> Environment:
    """The trainer's; skips the test unless `make test-exports` runs it."""
    home = os.environ.get("TRAINERS_HOME")
    if home is None:
        pytest.skip(f"{trainer} runs in an environment of its own: make test-exports")
    return Environment(trainer=trainer, python=Path(home).absolute() / trainer / "bin" / "python")
