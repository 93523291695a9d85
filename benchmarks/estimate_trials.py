"""Predictions beside the measurements of recorded trials, on whatever hardware they ran.

    python benchmarks/estimate_trials.py TABLE ... [--memory 0.03] [--time 0.25] [--trained AXIS=VALUE,...]
        [--json FILE]

A TABLE is a file of `autofit bench record` or `autofit db export`. Nothing is run and no device is needed: every config
that trained or ran out of memory is predicted anew, for the hardware and libraries of its table; a config's last full
measurement counts. The others are listed with what became of them. Prints, config by config, measured and predicted
device memory, host memory beyond what the process held before, and seconds of an optimizer step. The time is predicted
twice: from the data sheet alone, and as `autofit estimate` would predict it after all other trials of the same table.

Then, for each workload of each table and for all of one kind of hardware together, the figures that have targets, each
beside it: relative errors of peak allocated and reserved memory, and how often fit was misjudged at the limit that the
trial ran under. They are given again without compiled configs, whose graphs are assumed to take what the others take.
Last come the configs that are farthest off.

Exits with 0 only if every target is reached over all of one kind of hardware. With --memory or --time, it exits with 0
only if some config trained, each that did is within them (relative error of device memory; of the second time, or of
the first where there is no other trial), no config's fit was misjudged, and none failed in any other way than by
running out of memory. With --trained, a config must have trained with each of these values, too. The predictions are of
the same step as the trials only if these ran on the present versions of the libraries. One to two seconds per config.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cpu_figures import misjudged
from cpu_rows import latest, read

from autofit.catalog.models import load
from autofit.estimate.estimate import Estimate
from autofit.operations.allocator_shown import shown
from autofit.operations.calibration import LATEST, calibrated_for
from autofit.operations.comparing import Distribution
from autofit.outcome import Fits, Measurement, Trial
from autofit.techniques import Job

SIZES = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
"""What is compared of memory: fields of both a prediction and a measurement."""
WORST = 5
"""How many of the configs that are farthest off are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trial beside its prediction."""

    trial: Trial
    guessed: Estimate
    """Its time from the data sheet alone; without a time where nothing is known of the hardware."""
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

    def memory_error(self, size: str = "device_bytes") -> float | None:
        """Predicted over measured memory, minus one; `size` is one of `SIZES`."""
        return None if self.measured is None else getattr(self.guessed, size) / getattr(self.measured, size) - 1.0

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
                **{size: getattr(guessed, size) for size in SIZES},
                "host_bytes": guessed.host_bytes,
                "step_seconds_from_data_sheet": guessed.step_seconds,
                "step_seconds": self.calibrated.step_seconds,
                "calibrated_on": self.calibrated.calibrated_on,
            },
            "measured": None
            if measured is None
            else {
                **{size: getattr(measured, size) for size in SIZES},
                "host_bytes": measured.host_peak_bytes - measured.host_baseline_bytes,
                "step_seconds": measured.step_seconds.median,
            },
            "memory_errors": {size: self.memory_error(size) for size in SIZES},
            "time_error_from_data_sheet": self.time_error(guessed),
            "time_error": self.time_error(self.calibrated),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of merit over some trials."""

    name: str
    of: Callable[[Sequence[Row]], float | None]
    """None where no trial has it."""
    most: float | None
    """Its target; None for a figure that has none."""

    def reached(self, rows: Sequence[Row]) -> bool:
        """Whether the target is reached; true without one, false where no trial can show it."""
        found = self.of(rows)
        return self.most is None or (found is not None and found <= self.most)


def _error(rows: Sequence[Row], size: str, statistic: str) -> float | None:
    errors = [error for row in rows if (error := row.memory_error(size)) is not None]
    return float(getattr(Distribution.of(errors), statistic)) if errors else None


def _misjudged_at_limit(rows: Sequence[Row]) -> float | None:
    return sum(row.misjudged for row in rows) / len(rows) if rows else None


def _misjudged_between(rows: Sequence[Row]) -> float | None:
    sizes = [(row.guessed.device_bytes, row.measured.device_bytes) for row in rows if row.measured is not None]
    return misjudged([said for said, _ in sizes], [measured for _, measured in sizes]) if len(sizes) > 1 else None


MEDIAN, P95 = "median_absolute", "p95_absolute"
BETWEEN = Figure(name="fit misjudged, limits between neighbouring sizes", of=_misjudged_between, most=None)
FIGURES = {
    "cuda": (
        Figure(name="peak allocated, median", of=partial(_error, size=SIZES[0], statistic=MEDIAN), most=0.01),
        Figure(name="peak allocated, 95th percentile", of=partial(_error, size=SIZES[0], statistic=P95), most=0.03),
        Figure(name="peak reserved, median", of=partial(_error, size=SIZES[1], statistic=MEDIAN), most=0.03),
        Figure(name="peak reserved, 95th percentile", of=partial(_error, size=SIZES[1], statistic=P95), most=None),
        Figure(name="device memory, median", of=partial(_error, size=SIZES[2], statistic=MEDIAN), most=None),
        Figure(name="fit misjudged", of=_misjudged_at_limit, most=0.01),
        BETWEEN,
    ),
    "cpu": (
        Figure(name="device memory, median", of=partial(_error, size=SIZES[2], statistic=MEDIAN), most=0.03),
        Figure(name="fit misjudged", of=_misjudged_at_limit, most=0.02),
        BETWEEN,
    ),
}
"""By kind of hardware. A processor's trials have one size for all three."""


def compared(trials: Sequence[Trial]) -> list[Row]:
    """The trials of one hardware, stack and workload, each with its predictions."""
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.speed import prior

    first = trials[0]
    model = load(first.workload.model)
    job = Job(model=model, workload=first.workload, hardware=first.hardware, stack=first.stack)
    # The context is part of what is compared.
    job = replace(job, expandable_segments=shown(job, reversed(trials)).expandable_segments)
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
    """The distributions of all errors, and how often fit was misjudged."""
    errors = {size: [row.memory_error(size) for row in rows] for size in SIZES}
    errors["step_seconds"] = [row.time_error(row.calibrated) for row in rows]
    errors["step_seconds_from_data_sheet"] = [row.time_error(row.guessed) for row in rows]
    known = {name: [error for error in every if error is not None] for name, every in errors.items()}
    return {
        "configs": len(rows),
        "trained": sum(row.measured is not None for row in rows),
        "fit_misjudged": sum(row.misjudged for row in rows),
        "fit_misjudged_between_neighbouring_sizes": _misjudged_between(rows),
        "errors": {name: asdict(Distribution.of(every)) for name, every in known.items() if every},
    }


def within(row: Row, memory: float | None, time: float | None) -> bool:
    """Whether fit was judged rightly and, where it trained, each error that has a limit is known and no larger."""
    errors = ((row.memory_error(), memory), (row.time_error(row.calibrated), time))
    known = all(most is None or (error is not None and abs(error) <= most) for error, most in errors)
    return not row.misjudged and (row.measured is None or known)


def failed(trials: Sequence[Trial]) -> list[Trial]:
    """The last trial of each config that never trained nor ran out of memory: there is nothing to compare it with."""
    last = {_told(trial): trial for trial in trials}
    compared = {_told(trial) for group in latest(trials) for trial in group}
    return [trial for key, trial in last.items() if key not in compared]


def _told(trial: Trial) -> tuple[Any, ...]:
    return trial.hardware.key, trial.stack.key, trial.workload.key, trial.config


def _failed_text(trial: Trial) -> str:
    reason = getattr(trial.outcome, "reason", "no reason is known")
    return f"not compared: {trial.outcome.kind.replace('_', ' ')}: {reason}   {trial.config}"


def untrained(wanted: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Those of the values, each written `axis=value`, with which no config trained."""
    trained = {value for row in rows if row.measured is not None for value in str(row.trial.config).split(",")}
    return [value for value in wanted if value not in trained]


def _values(text: str) -> list[str]:
    axis, _, values = text.partition("=")
    if not axis or not all(values.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not AXIS=VALUE,VALUE,...")
    return [f"{axis}={value}" for value in values.split(",")]


def figures_text(title: str, kind: str, rows: Sequence[Row]) -> str:
    """The figures of merit over `rows`, each beside its target, and the configs that are farthest off."""
    eager = [row for row in rows if row.trial.config["compile"] is not True]
    trained = sum(row.measured is not None for row in rows)
    lines = [f"{title}: {len(rows)} configs, of which {trained} trained and {len(rows) - len(eager)} are compiled"]
    lines.append(f"{'':50} {'target':>7} {'found':>7}           {'without compiled':>17}")
    for figure in FIGURES[kind]:
        reached = "" if figure.most is None else "reached" if figure.reached(rows) else "MISSED"
        shares = [_share(figure.most), _share(figure.of(rows))]
        lines.append(f"{figure.name:50} {shares[0]:>7} {shares[1]:>7} {reached:9} {_share(figure.of(eager)):>17}")
    lines.append("farthest off:")
    return "\n".join([*lines, *(f"  {text(row)}" for row in farthest(rows))])


def farthest(rows: Sequence[Row]) -> list[Row]:
    """The rows whose fit was misjudged, then those whose allocated or reserved memory is farthest off."""

    def off(row: Row) -> tuple[bool, float]:
        return row.misjudged, max(abs(row.memory_error(size) or 0.0) for size in SIZES[:2])

    return sorted(rows, key=off, reverse=True)[:WORST]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


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
    allocated, reserved, device = (row.memory_error(size) for size in SIZES)
    return (
        f"{measured.device_bytes / 2**30:7.2f} GiB, host {host / 2**30:7.2f} GiB; predicted {_gib(row.guessed)} "
        f"{device:+6.1%}, allocated {allocated:+6.1%}, reserved {reserved:+6.1%}; step {seconds}   {config}"
    )


def _gib(predicted: Estimate) -> str:
    return f"{predicted.device_bytes / 2**30:7.2f} GiB, host {predicted.host_bytes / 2**30:7.2f} GiB"


def parsed() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE")
    parser.add_argument("--memory", type=float, help="largest relative error of a config's device memory")
    parser.add_argument("--time", type=float, help="largest relative error of the time of a config's step")
    parser.add_argument("--trained", type=_values, default=[], metavar="AXIS=VALUE,...")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.trained and asked.memory is None and asked.time is None:
        parser.error("--trained goes with --memory or --time")
    return asked


def main() -> int:
    """Predict, compare, print; the exit status."""
    asked = parsed()
    documents: list[dict[str, Any]] = []
    lost: list[Trial] = []
    every: dict[str, list[Row]] = defaultdict(list)
    for table in asked.tables:
        trials = read(table)
        lost += failed(trials)
        for group in latest(trials):
            first, rows = group[0], compared(group)
            every[first.hardware.kind] += rows
            print(f"{table.name}: {first.workload.model} on {first.hardware.name}")
            print("seconds of a step: measured, predicted from the data sheet, predicted after the other trials")
            print("\n".join(map(text, rows)))
            print(figures_text(f"{first.workload.model} on {first.hardware.name}", first.hardware.kind, rows))
            about = {name: getattr(first, name).to_json() for name in ("hardware", "stack", "workload")}
            documents.append({"table": table.name, **about, **summary(rows), "rows": [row.to_json() for row in rows]})
    for trial in lost:
        print(_failed_text(trial))
    if not documents:
        print("estimate_trials.py: no config in these tables trained or ran out of memory", file=sys.stderr)
        return 2
    for kind, rows in every.items():
        print(figures_text(f"all on {kind}", kind, rows))
    if asked.json:
        asked.json.write_text(json.dumps(documents, indent=2) + "\n", encoding="utf-8")
    if asked.memory is None and asked.time is None:
        return 0 if all(figure.reached(rows) for kind, rows in every.items() for figure in FIGURES[kind]) else 1
    return _one_by_one(asked, [row for rows in every.values() for row in rows], lost)


def _one_by_one(asked: argparse.Namespace, rows: Sequence[Row], lost: Sequence[Trial]) -> int:
    """The exit status where limits are asked for of every config; says what is missing of it."""
    off = sum(not within(row, asked.memory, asked.time) for row in rows)
    wrong = [f"{off} of {len(rows)} configs are predicted wrongly"] if off else []
    wrong += [f"{len(lost)} failed in another way than by running out of memory"] if lost else []
    wrong += [f"none trained with {value}" for value in untrained(asked.trained, rows)]
    if all(row.measured is None for row in rows):
        wrong.append("none trained")
    print("\n".join(wrong) or "every config is as asked for")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
