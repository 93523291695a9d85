"""Speeds predicted from data sheets alone, beside those that others have published for one GPU.

    python benchmarks/published_speeds.py [--json FILE]

Compares the rows of published/measurements.csv whose memory is compared too, and those of published/speeds.csv, which
state all that a prediction needs. Prints each with predicted over published tokens per second, and the share of its
time in which the GPU waits for launches; then the median absolute error, the median of each card, and Kendall's tau.

The time to launch an operation (`speed.OPERATION_SECONDS`) was taken from the two smallest runs of the smallest model
in speeds.csv, which do nothing but wait for launches; no other row was used to choose anything. The Qwen models of that
file have code of their own: they are traced as Llamas of the same widths. The runs of TransformerEngine's example pad
their batches, so their figures are upper bounds. Takes about a minute.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import estimate_published
from cpu_figures import kendall

from autofit.catalog.models import Model, load, names
from autofit.core.work_kinds import LAUNCH
from autofit.estimate.estimator import Estimator
from autofit.estimate.speed import prior
from autofit.lattice import Config
from autofit.operations.estimating import site
from autofit.techniques import Job, complete, parse
from autofit.workload import Workload

PUBLISHED = estimate_published.PUBLISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One run: tokens per second."""

    setting: str
    card: str
    published: float
    predicted: float
    launching: float
    """Host time of the launches over the predicted time."""

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published


def speeds() -> Iterator[Speed]:
    """Every row, as it is predicted."""
    _, stack = site("a100-80g")
    for row in estimate_published.rows():
        if row.gpus == 1 and row.tokens_per_second and not row.ran_out and not estimate_published.left_out(row):
            job = estimate_published.job(row, stack)
            yield _predicted(row.setting, job, estimate_published.settings(row), row.tokens_per_second)
    with (PUBLISHED / "speeds.csv").open(newline="", encoding="utf-8") as lines:
        for fields in csv.DictReader(lines):
            model = _model(fields["model"])
            device, _ = site(fields["card"])
            workload = Workload(
                model=model.name,
                model_digest=model.digest,
                seq_len=int(fields["seq_len"]),
                global_batch=int(fields["global_batch"]),
            )
            job = Job(model=model, workload=workload, hardware=device, stack=stack)
            name = f"{fields['model']}, {fields['config']}, {workload.seq_len} tokens, {fields['card']}"
            yield _predicted(name, job, complete(parse(fields["config"])), float(fields["tokens_per_second"]))


def _model(name: str) -> Model:
    return load(name if name in names() else str(PUBLISHED / "models" / f"{name}.json"))


def _predicted(setting: str, job: Job, config: Config, published: float) -> Speed:
    rates = prior(job.hardware)
    assert rates is not None, "every card of the files is in the catalog"
    found = Estimator(job, rates).estimate(config, memory_limit_bytes=job.hardware.memory_bytes)
    assert found.tokens_per_second is not None and found.step_seconds is not None and found.work is not None
    launching = found.work.amounts[LAUNCH] * rates.per(LAUNCH) / found.step_seconds
    return Speed(
        setting=setting,
        card=job.hardware.name,
        published=published,
        predicted=found.tokens_per_second,
        launching=launching,
    )


def main() -> None:
    """Print the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    every: list[Speed] = []
    for found in speeds():
        print(
            f"{found.setting:116.116} {found.published:8,.0f} {found.predicted:8,.0f}  {found.ratio:.2f}  "
            f"launches {found.launching:.0%}",
            flush=True,
        )
        every.append(found)
    figures = {
        "rows": len(every),
        "median_absolute_error": statistics.median(abs(found.ratio - 1.0) for found in every),
        "largest_absolute_error": max(abs(found.ratio - 1.0) for found in every),
        "median_ratio": {
            card: statistics.median(found.ratio for found in every if found.card == card)
            for card in sorted({found.card for found in every})
        },
        "kendall_tau": kendall([found.predicted for found in every], [found.published for found in every]),
    }
    print(json.dumps(figures, indent=1))
    if asked.json:
        listed = [{**asdict(found), "ratio": found.ratio} for found in every]
        record = {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds"), **figures, "listed": listed}
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
