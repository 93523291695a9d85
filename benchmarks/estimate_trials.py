"""Predictions beside the measurements of recorded trials, on whatever hardware they ran.

    python benchmarks/estimate_trials.py [TABLE ...] [--least 60] [--json FILE]

A TABLE is a file of `autofit bench record` or `autofit db export`; without one, every recorded table of a processor
with two cores. Nothing is run and no device is needed. Each config is predicted anew: its last full measurement counts.
Prints every config with its errors, then the figures of each workload and of all:

* errors: of all configs, and how often fit was misjudged at the trials' limit; times are calibrated on all other
  trials of the workload;
* calibrated: tokens/s after calibration on 5 trials drawn at random, over the others; the median and the worst
  of 20 draws; uncalibrated: of all trials, by the table's own probe or else by the data sheet.

Figures of as many configs that trained as --least says are held to the targets. Exits with 0 only if some are and all
are reached. One to two seconds per config.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autofit.catalog.models import load
from autofit.core.device.probe import Probe
from autofit.core.outcome import Fits, Measurement, OutOfMemory, Trial
from autofit.estimate.assumptions import as_probed
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.time.fitted_rates import calibrated
from autofit.estimate.time.guessed_rates import prior
from autofit.estimate.time.roofline import Rates, seconds
from autofit.estimate.tracing.trace_cache import TraceCache
from autofit.operations.recording.table_file import is_table, read_table
from autofit.prediction.calibration import with_observed_allocator
from autofit.prediction.probing import rates_of
from autofit.store import read_lines
from autofit.techniques import Job

SIZES = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
RECORDED = sorted((Path(__file__).parent / "recorded").glob("cpu-*2c-*.jsonl"))
CALIBRATE_ON, SEEDS = 5, 20
TARGETS = {
    "cuda": {
        "peak_allocated_bytes median_absolute": 0.01,
        "peak_allocated_bytes p95_absolute": 0.03,
        "peak_reserved_bytes median_absolute": 0.03,
        "fit_misjudged": 0.01,
        "step_seconds median_absolute": 0.25,
    },
    "cpu": {
        "device_bytes median_absolute": 0.03,
        "fit_misjudged": 0.02,
        "calibrated tokens_per_second": 0.15,
        "calibrated kendall_tau": 0.85,
    },
}
"""The most that each may be; of tau, the least."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One trial that fitted or ran out of memory, and its prediction."""

    trial: Trial
    estimate: Estimate
    job: Job
    rates: Rates | None
    """Those known before any trial."""

    @property
    def measured(self) -> Measurement | None:
        """None where it ran out of memory."""
        return self.trial.outcome.measurement if isinstance(self.trial.outcome, Fits) else None

    @property
    def is_timed(self) -> bool:
        """Whether there are a predicted and a measured time."""
        return self.measured is not None and self.rates is not None and self.estimate.work is not None

    def speed(self, rates: Rates) -> float:
        """Predicted tokens/s."""
        return self.job.workload.tokens_per_step / seconds(self.estimate.work, rates)

    def predicted(self, others: Sequence[Row]) -> Trial:
        """The trial with its prediction, whose time is calibrated on others."""
        return replace(
            self.trial, prediction=Estimate.of(self.estimate, self.job, fitted(self.rates, others)).prediction
        )


def fitted(rates: Rates | None, rows: Sequence[Row]) -> Rates | None:
    """The rates that some rows show."""
    known = [(row.estimate.work, row.measured.step_seconds.median) for row in rows]
    # As one group: the expected error, which needs a fit for each trial, is not wanted here.
    return None if rates is None else calibrated(rates, known, ["all"] * len(known))


def read(file: Path) -> tuple[list[Trial], Probe | None]:
    """The trials of a recorded table or of an export, and the table's probe."""
    if not is_table(file):
        with file.open(encoding="utf-8") as lines:
            return list(read_lines(lines)), None
    table = read_table(file, whole=True)
    return list(table.trials), table.probe


def latest(trials: Iterable[Trial]) -> list[list[Trial]]:
    """For each hardware, stack and workload, one trial per config: the last that fitted and was not stopped early, else
    the first that tells anything of memory."""
    found: dict[Any, dict[Any, Trial]] = defaultdict(dict)
    for trial in trials:
        known = found[trial.hardware.key, trial.stack.key, trial.workload.key]
        if isinstance(trial.outcome, Fits) and not trial.outcome.measurement.stopped_early:
            known[trial.config] = trial
        elif isinstance(trial.outcome, Fits) or trial.ran_out_on_device:
            known.setdefault(trial.config, trial)
    return [list(known.values()) for known in found.values() if known]


def compared(trials: Sequence[Trial], probe: Probe | None = None, cache: TraceCache | None = None) -> list[Row]:
    """The trials of one workload, each with its prediction. Without a cache of traces, everything is traced anew."""
    first, rates = trials[0], prior(trials[0].hardware)
    job = Job(model=load(first.workload.model), workload=first.workload, hardware=first.hardware, stack=first.stack)
    # The context is part of what is compared, so trials do not show it.
    job = replace(job, expandable_segments=with_observed_allocator(job, reversed(trials)).expandable_segments)
    job = as_probed(job, probe)
    if probe is not None and rates is not None:
        rates = rates_of(probe, rates)
    estimator = Estimator(job, rates, cache=cache)
    estimates = (estimator.estimate(trial.config, memory_limit_bytes=trial.memory_limit_bytes) for trial in trials)
    return [Row(trial=one, estimate=said, job=job, rates=rates) for one, said in zip(trials, estimates, strict=True)]


def errors(trial: Trial) -> dict[str, float]:
    """Predicted over measured, minus one, of each quantity that the trial has both predicted and measured: positive
    errors are overestimates. Of time only where other trials calibrated it."""
    predicted, measured = trial.prediction, trial.measurement
    if predicted is None or measured is None:
        return {}
    pairs = {size: (getattr(predicted, size), getattr(measured, size)) for size in SIZES}
    if predicted.calibrated_on:
        pairs["step_seconds"] = predicted.step_seconds, measured.step_seconds.median
    return {name: said / shown - 1.0 for name, (said, shown) in pairs.items() if said is not None and shown > 0}


def distribution(found: Sequence[float]) -> dict[str, float]:
    """Of at least one error. The 95th percentile is by nearest rank; the worst, farthest from zero, has its sign."""
    sizes = sorted(map(abs, found))
    return {
        "count": len(found),
        "median": statistics.median(found),
        "median_absolute": statistics.median(sizes),
        "p95_absolute": sizes[math.ceil(0.95 * len(sizes)) - 1],
        "worst": max(found, key=abs),
    }


def fit(trials: Sequence[Trial]) -> dict[str, int]:
    """How often a prediction was wrong about whether a config fits its trial's limit: `too_hopeful` where it ran out of
    memory unforeseen, `too_careful` where it fitted unforeseen."""
    pairs = [(t.prediction.fits(t.memory_limit_bytes), isinstance(t.outcome, Fits)) for t in trials if t.prediction]
    hopeful, careful = pairs.count((True, False)), pairs.count((False, True))
    return {"judged": len(pairs), "too_hopeful": hopeful, "too_careful": careful, "misjudged": hopeful + careful}


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-a: concordant minus discordant pairs, over all pairs."""
    pairs = itertools.combinations(zip(one, other, strict=True), 2)
    signs = [((a > b) - (a < b)) * ((c > d) - (c < d)) for (a, c), (b, d) in pairs]
    return sum(signs) / len(signs)


def speeds_judged(rows: Sequence[Row], learnt_from: Sequence[Row] = ()) -> tuple[float, float]:
    """The median absolute error of tokens/s, and tau."""
    rates = fitted(rows[0].rates, learnt_from)
    said, measured = [row.speed(rates) for row in rows], [row.measured.tokens_per_second for row in rows]
    errors = [abs(p / m - 1.0) for p, m in zip(said, measured, strict=True)]
    return statistics.median(errors), kendall(said, measured)


def speeds(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of tokens/s; those that rows are too few for are left out."""
    timed = [row for row in rows if row.is_timed]
    if len(timed) < 2:
        return {}
    before = speeds_judged(timed)
    uncalibrated = {"uncalibrated": {"tokens_per_second": before[0], "kendall_tau": before[1]}}
    if len(timed) < CALIBRATE_ON + 2:
        return uncalibrated
    draws = [random.Random(seed).sample(timed, CALIBRATE_ON) for seed in range(SEEDS)]
    found = [speeds_judged([row for row in timed if row not in drawn], drawn) for drawn in draws]
    errors, taus = zip(*found, strict=True)
    return {
        "calibrated tokens_per_second": {"median": statistics.median(errors), "worst": max(errors)},
        "calibrated kendall_tau": {"median": statistics.median(taus), "worst": min(taus)},
        **uncalibrated,
    }


def figures_of(name: str, trials: Sequence[Trial], least: int, speed: dict[str, Any]) -> dict[str, Any]:
    """All figures of some predicted trials, and those that have targets beside these; none where too few trained."""
    found: dict[str, list[float]] = defaultdict(list)
    for quantity, error in (item for trial in trials for item in errors(trial).items()):
        found[quantity].append(error)
    every = {"errors": {quantity: distribution(all_of) for quantity, all_of in found.items()}, "fit": fit(trials)}
    known = {"fit_misjudged": every["fit"]["misjudged"] / every["fit"]["judged"]}
    known |= {f"{of} {name}": value for of, spread in every["errors"].items() for name, value in spread.items()}
    known |= {name: value["median"] for name, value in speed.items() if name.startswith("calibrated")}
    targets = []
    if sum(isinstance(trial.outcome, Fits) for trial in trials) >= least:
        for figure, target in TARGETS[trials[0].hardware.kind].items():
            if figure in known:
                reached = known[figure] >= target if "tau" in figure else known[figure] <= target
                targets.append({"figure": figure, "found": known[figure], "target": target, "reached": reached})
    figures = {"table": name, **every, **speed, "targets": targets}
    print(json.dumps(figures, indent=1))
    return figures


def predicted(rows: Sequence[Row]) -> list[Trial]:
    """Each trial with its prediction, calibrated on all others; prints each one's errors."""
    timed = [row for row in rows if row.is_timed]
    found = [row.predicted([other for other in timed if other is not row]) for row in rows]
    for trial in found:
        own = {of: round(error, 4) for of, error in errors(trial).items()} or trial.outcome.kind
        print(json.dumps({"config": str(trial.config), "errors": own, "misjudged": fit([trial])["misjudged"]}))
    return found


def main() -> int:
    """Predict, compare, print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, metavar="TABLE", default=RECORDED)
    parser.add_argument("--least", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    documents, every = [], defaultdict(list)
    for table in asked.tables:
        trials, probe = read(table)
        for trial in trials:
            if not isinstance(trial.outcome, Fits | OutOfMemory):
                print(json.dumps({"config": str(trial.config), "not compared": trial.outcome.kind}))
        for group in latest(trials):
            rows = compared(group, probe)
            found = predicted(rows)
            about = {part: getattr(group[0], part).to_json() for part in ("hardware", "stack", "workload")}
            documents.append({**about, **figures_of(table.name, found, asked.least, speeds(rows))})
            every[group[0].hardware.kind] += found
    documents += [figures_of(f"all on {kind}", trials, asked.least, {}) for kind, trials in every.items()]
    if asked.json:
        text = json.dumps({"recorded_at": datetime.now(UTC).isoformat(), "tables": documents}, indent=1)
        asked.json.write_text(text + "\n", encoding="utf-8")
    reached = [target["reached"] for document in documents for target in document["targets"]]
    return 0 if reached and all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
