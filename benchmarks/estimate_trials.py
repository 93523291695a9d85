"""Predictions beside the measurements of recorded trials, on whatever hardware they ran.

    python benchmarks/estimate_trials.py TABLE ... [--memory 0.03] [--time 0.25] [--json FILE]

A TABLE is a file of `autofit bench record` or `autofit db export`. Nothing is run and no device is needed: every config
that trained or ran out of memory is predicted anew, for the hardware and libraries of its table; a config's last full
measurement counts. Prints, config by config, measured and predicted device memory, host memory beyond what the process
held before, and seconds of an optimizer step. The time is predicted twice: from the data sheet alone, and as `autofit
estimate` would predict it after all other trials of the same table. Then the median and the worst error, and how often
fit was misjudged.

Exits with 0 only if every config that trained is within --memory (relative error of device memory) and --time (of the
second time; of the first where there is no other trial), and no config's fit was misjudged. The predictions are of the
same step as the trials only if these ran on the present versions of the libraries. One to two seconds per config.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from estimate_cpu import latest, read

from autofit.catalog.models import load
from autofit.estimate.estimate import Estimate
from autofit.operations.calibration import LATEST, calibrated_for
from autofit.outcome import Fits, Measurement, Trial
from autofit.techniques import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trial beside its prediction."""

    trial: Trial
    guessed: Estimate
    """Its time from the data sheet alone; None where nothing is known of the hardware."""
    calibrated: Estimate
    """Its time after all other trials of the same table."""

    @property
    def measured(self) -> Measurement | None:
        """None where it ran out of memory."""
        return self.trial.outcome.measurement if isinstance(self.trial.outcome, Fits) else None

    @property
    def misjudged(self) -> bool:
        """Whether it fitted unforeseen, or ran out of memory unforeseen."""
        return self.guessed.fits != (self.measured is not None)

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured device memory, minus one."""
        return None if self.measured is None else self.guessed.device_bytes / self.measured.device_bytes - 1.0

    def time_error(self, predicted: Estimate) -> float | None:
        """The same of the seconds of a step."""
        if self.measured is None or predicted.step_seconds is None:
            return None
        return predicted.step_seconds / self.measured.step_seconds.median - 1.0

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; sizes in bytes."""
        measured, guessed = self.measured, self.guessed
        return {
            "config": self.trial.config.to_json(),
            "outcome": self.trial.outcome.kind,
            "predicted": {
                "fits": guessed.fits,
                "peak_allocated_bytes": guessed.peak_allocated_bytes,
                "device_bytes": guessed.device_bytes,
                "host_bytes": guessed.host_bytes,
                "step_seconds_from_data_sheet": guessed.step_seconds,
                "step_seconds": self.calibrated.step_seconds,
                "calibrated_on": self.calibrated.calibrated_on,
            },
            "measured": None
            if measured is None
            else {
                "peak_allocated_bytes": measured.peak_allocated_bytes,
                "device_bytes": measured.device_bytes,
                "host_bytes": measured.host_peak_bytes - measured.host_baseline_bytes,
                "step_seconds": measured.step_seconds.median,
            },
            "memory_error": self.memory_error,
            "time_error_from_data_sheet": self.time_error(guessed),
            "time_error": self.time_error(self.calibrated),
        }


def compared(trials: Sequence[Trial]) -> list[Row]:
    """The trials of one hardware, stack and workload, each with its predictions."""
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.speed import prior

    first = trials[0]
    job = Job(model=load(first.workload.model), workload=first.workload, hardware=first.hardware, stack=first.stack)
    guess = prior(first.hardware)
    estimator = Estimator(job, guess)
    estimates = [estimator.estimate(trial.config, memory_limit_bytes=trial.memory_limit_bytes) for trial in trials]
    predicted = [replace(t, prediction=e.prediction) for t, e in zip(trials, estimates, strict=True)]
    rows = []
    for place, estimate in enumerate(estimates):
        others = [*predicted[:place], *predicted[place + 1 :]][-LATEST:]
        rates = None if guess is None else calibrated_for(first.workload.key, guess, reversed(others))
        rows.append(Row(trial=trials[place], guessed=estimate, calibrated=estimate.timed(job, rates)))
    return rows


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Median absolute and worst errors, and how often fit was misjudged."""
    errors = {
        "memory": [row.memory_error for row in rows],
        "time": [row.time_error(row.calibrated) for row in rows],
        "time_from_data_sheet": [row.time_error(row.guessed) for row in rows],
    }
    known = {name: [error for error in every if error is not None] for name, every in errors.items()}
    return {
        "configs": len(rows),
        "trained": sum(row.measured is not None for row in rows),
        "fit_misjudged": sum(row.misjudged for row in rows),
        **{
            name: {"median_absolute_error": statistics.median(map(abs, every)), "worst_error": max(every, key=abs)}
            for name, every in known.items()
            if every
        },
    }


def within(row: Row, memory: float, time: float) -> bool:
    """Whether fit was judged rightly and, of what is known, no error is larger than these."""
    errors = ((row.memory_error, memory), (row.time_error(row.calibrated), time))
    return not row.misjudged and all(error is None or abs(error) <= most for error, most in errors)


def text(row: Row) -> str:
    """One trial on one line."""
    config = ",".join(f"{axis}={value}" for axis, value in row.trial.config.to_json().items())
    measured = row.measured
    if measured is None:
        foretold = "fits" if row.guessed.fits else "does not"
        return f"{row.trial.outcome.kind.replace('_', ' ')}; predicted: {foretold}, {_gib(row.guessed)}   {config}"
    host = measured.host_peak_bytes - measured.host_baseline_bytes
    seconds = f"{measured.step_seconds.median:8.3f}"
    for predicted in (row.guessed, row.calibrated):
        error = row.time_error(predicted)
        seconds += "        -        " if error is None else f" {predicted.step_seconds:8.3f} {error:+7.1%}"
    return (
        f"{measured.device_bytes / 2**30:7.2f} GiB, host {host / 2**30:7.2f} GiB; predicted {_gib(row.guessed)} "
        f"{row.memory_error:+6.1%}; step {seconds}   {config}"
    )


def _gib(predicted: Estimate) -> str:
    return f"{predicted.device_bytes / 2**30:7.2f} GiB, host {predicted.host_bytes / 2**30:7.2f} GiB"


def main() -> int:
    """Predict, compare, print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE")
    parser.add_argument("--memory", type=float, default=0.03, help="largest relative error of device memory")
    parser.add_argument("--time", type=float, default=0.25, help="largest relative error of a step's time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    documents, good = [], True
    for table in asked.tables:
        for group in latest(read(table)):
            first, rows = group[0], compared(group)
            print(f"{table.name}: {first.workload.model} on {first.hardware.name}")
            print("seconds of a step: measured, predicted from the data sheet, predicted after the other trials")
            print("\n".join(map(text, rows)))
            found = summary(rows)
            found["within"] = sum(within(row, asked.memory, asked.time) for row in rows)
            good = good and found["within"] == len(rows)
            print(json.dumps(found, indent=2))
            about = {name: getattr(first, name).to_json() for name in ("hardware", "stack", "workload")}
            documents.append({"table": table.name, **about, **found, "rows": [row.to_json() for row in rows]})
    if not documents:
        parser.error("no config in these tables trained or ran out of memory")
    if asked.json:
        asked.json.write_text(json.dumps(documents, indent=2) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
