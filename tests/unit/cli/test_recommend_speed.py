"""`autofit recommend` as users run it: a process of its own over a store of 100,000 trials."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from unit.operations.made_trials import fits, make_trial, out_of_memory
from unit.store.many_trials import fill

from autofit.store import Store

PROCESSOR_SECONDS = 1.0
"""What a recommendation may take on the machine of benchmarks/README.md."""
YARDSTICK = ("-c", "import sqlalchemy.orm, pydantic, typer, yaml, asyncio")
YARDSTICK_SECONDS = 0.42
"""Of processor time, what the yardstick takes there while nothing else runs."""


def processor_seconds(command: Sequence[str]) -> tuple[float, str]:
    """Of a process and its children; wall time says nothing of a program while other tests run. And what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def test_a_recommendation_from_100_000_trials_takes_a_second_at_most(tmp_path: Path) -> None:
    """On a slower machine, or one whose cores serve others beside, as much longer as loading libraries takes there."""
    path = tmp_path / "store.db"
    with Store.open(str(path)) as store:
        store.add(make_trial({}, out_of_memory()))
    fill(path, 100_000, fits(3, 1000))
    program = str(Path(sys.executable).with_name("autofit"))
    asked = ["recommend", "--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4", "--store", str(path)]
    taken, loading = [], []
    for _ in range(5):
        loading.append(processor_seconds([sys.executable, *YARDSTICK])[0])
        seconds, said = processor_seconds([program, *asked])
        assert "on h100-80g" in said
        taken.append(seconds)
    slower = max(1.0, min(loading) / YARDSTICK_SECONDS)
    assert min(taken) < slower * PROCESSOR_SECONDS, (taken, loading)
