"""The script for Slurm, with stand-ins for its own programs alone: Ray and the search are real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

SCRIPT = Path(__file__).parents[2] / "docs" / "admin" / "search.sbatch"
FOLDER = Path(f"/tmp/ray-{os.getpid()}")
SRUN = """#!/bin/sh
echo "$@" >> "$ASKED"
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
echo 127.0.0.1
echo another
"""


def run_script(tmp_path: Path, **stand_ins: str) -> subprocess.CompletedProcess[str]:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, **stand_ins}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "ASKED": str(tmp_path / "asked"),
    }
    options = ["--model", "smollm2-135m", "--seq-len", "64", "--global-batch", "2", "--memory-limit", "10MiB"]
    return subprocess.run(
        ["bash", str(SCRIPT), *options, "--store", str(tmp_path / "store.db")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_a_job_searches_on_all_its_nodes_and_ends_what_it_started(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode == 3, done.stderr
    assert "autofit: smollm2-135m cannot fit 10 MiB" in done.stderr
    *starts, last = (tmp_path / "asked").read_text().splitlines()
    head, others = sorted(starts, key=lambda line: "--exclude" in line)
    assert "--nodelist=127.0.0.1 ray start" in head and "--head" in head
    assert "--nodes=1 --ntasks=1 --exclude=127.0.0.1" in others and "--address=127.0.0.1:" in others
    port = f"{20000 + os.getpid() % 10000}"
    left = [p.cmdline() for p in psutil.process_iter() if any(word.endswith(f":{port}") for word in _words(p))]
    assert left == []
    assert last == f"--nodes=2 --ntasks=2 rm -rf {FOLDER}" and not FOLDER.exists()


def test_a_job_ends_whose_ray_does_not_start(tmp_path: Path) -> None:
    done = run_script(tmp_path, ray="#!/bin/sh\nexit 1\n")
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert "Ray's head has not started" in done.stderr


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
