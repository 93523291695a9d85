"""Recorded trials of a processor beside what the estimator predicts of them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autofit.catalog.models import load
from autofit.estimate.estimate import Estimate
from autofit.estimate.heap import SHARES, causes
from autofit.lattice import Config
from autofit.operations import read_table
from autofit.operations.pooling import pooled
from autofit.operations.recorded_tables import is_table
from autofit.outcome import Fits, Measurement, OutOfMemory, Trial
from autofit.store import read_lines
from autofit.techniques import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One config, measured and predicted."""

    trial: Trial
    measured: Measurement
    predicted: Estimate
    causes: NDArray[np.float64]
    """The causes of the heap's part of its memory (estimate/heap.py)."""
    beside_bytes: int
    """Predicted memory without that part."""

    @property
    def shown(self) -> tuple[Any, float]:
        """What calibration learns from this config: predicted work, and measured median seconds of a step."""
        return self.predicted.work, self.measured.step_seconds.median

    @property
    def memory_error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted.device_bytes / self.measured.device_bytes - 1.0


def read(table: Path) -> list[Trial]:
    """The trials of a recorded table, or those of an export. Of several passes, each config has one trial with their
    geometric mean of its speed and their mean of its memory."""
    if is_table(table):
        passes = by_config(read_table(table))
        return [_of_mean_memory(trial, passes[config]) for config, trial in pooled(passes).items()]
    with table.open(encoding="utf-8") as lines:
        return list(read_lines(lines))


def _of_mean_memory(trial: Trial, passes: Sequence[Trial]) -> Trial:
    sizes = [t.outcome.measurement.device_bytes for t in passes if isinstance(t.outcome, Fits)]
    if len(sizes) < 2 or not isinstance(trial.outcome, Fits):
        return trial
    measured = replace(trial.outcome.measurement, device_bytes=int(statistics.fmean(sizes)))
    return replace(trial, outcome=Fits(measurement=measured))


def by_config(trials: Iterable[Trial]) -> dict[Config, list[Trial]]:
    """The trials of each config, in their order."""
    found: dict[Config, list[Trial]] = defaultdict(list)
    for trial in trials:
        found[trial.config].append(trial)
    return found


def latest(trials: Iterable[Trial]) -> list[list[Trial]]:
    """For each hardware, stack and workload, one trial per config: the last that fits, if possible one that was not
    stopped early; where none fits, the last that ran out of memory."""
    found: dict[tuple[str, str, str], dict[Any, Trial]] = defaultdict(dict)
    told = [t for t in trials if isinstance(t.outcome, (Fits, OutOfMemory))]
    # later trials replace earlier ones
    for trial in sorted(told, key=lambda t: (isinstance(t.outcome, Fits), not _stopped_early(t))):
        found[trial.hardware.key, trial.stack.key, trial.workload.key][trial.config] = trial
    return [list(known.values()) for known in found.values()]


def _stopped_early(trial: Trial) -> bool:
    return isinstance(trial.outcome, Fits) and trial.outcome.measurement.stopped_early


def compared(trials: Sequence[Trial]) -> tuple[list[Row], float]:
    """The trials of one workload that fit, each with its prediction (uncalibrated); and the share of all trials whose
    fit under their own limit is predicted wrongly."""
    from autofit.estimate.estimator import Estimator

    first = trials[0]
    job = Job(model=load(first.workload.model), workload=first.workload, hardware=first.hardware, stack=first.stack)
    estimator = Estimator(job, None)
    rows, wrong = [], []
    for trial in trials:
        found = estimator.estimate(trial.config, memory_limit_bytes=trial.memory_limit_bytes)
        if found.work is None:
            continue
        wrong.append(found.fits != isinstance(trial.outcome, Fits))
        if isinstance(trial.outcome, Fits):
            known = causes(estimator.trace(trial.config).timeline, estimator.traits(trial.config))
            beside = found.device_bytes - int(SHARES @ known)
            measured = trial.outcome.measurement
            rows.append(Row(trial=trial, measured=measured, predicted=found, causes=known, beside_bytes=beside))
    return rows, statistics.mean(wrong) if wrong else 0.0
