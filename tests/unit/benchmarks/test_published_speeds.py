"""The published speeds: that every row can be predicted, and that one run waits for launches as it was seen to."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from autofit.operations.estimating import site
from autofit.techniques import Job, complete, parse, unsupported
from autofit.workload import Workload

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("published_speeds")


def jobs(script: ModuleType) -> Iterator[tuple[dict[str, str], Job]]:
    """Every row of the file, as its columns and as a job."""
    with (BENCHMARKS / "published" / "speeds.csv").open(newline="", encoding="utf-8") as lines:
        for fields in csv.DictReader(lines):
            model = script._model(fields["model"])
            device, stack = site(fields["card"])
            tokens, batch = int(fields["seq_len"]), int(fields["global_batch"])
            workload = Workload(model=model.name, model_digest=model.digest, seq_len=tokens, global_batch=batch)
            yield fields, Job(model=model, workload=workload, hardware=device, stack=stack)


def test_every_row_can_be_predicted(script: ModuleType) -> None:
    for fields, job in jobs(script):
        assert unsupported(complete(parse(fields["config"])), job) is None
        assert float(fields["tokens_per_second"]) > 0


def test_the_smallest_run_waits_for_launches_as_long_as_it_was_seen_to(script: ModuleType) -> None:
    fields, job = next(jobs(script))
    found = script._predicted("", job, complete(parse(fields["config"])), float(fields["tokens_per_second"]))
    assert found.launching == pytest.approx(1.0)
    assert found.ratio == pytest.approx(1.0, rel=0.2)


def test_the_record_meets_its_target() -> None:
    record = json.loads((BENCHMARKS / "recorded" / "published-speeds.json").read_text())
    assert record["rows"] == len(record["listed"]) > 30
    assert record["median_absolute_error"] <= 0.2
