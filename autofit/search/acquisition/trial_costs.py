"""What trials cost: set-up, warm-up, timed steps and updates, as they really run."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from autofit.core.lattice import Config
from autofit.core.outcome import TimedOut, Trial
from autofit.core.prediction import Prediction
from autofit.planning.plan import Plan
from autofit.search.acquisition.surrogate import SETUP, Array, LogLinear, Rows
from autofit.search.budget import TIMING_SECONDS
from autofit.techniques.axes.sharding import micro_steps_run
from autofit.trial.measure.pace import Mixed, running_seconds


class TrialCosts:
    """The expected seconds of the trials of a plan's configs."""

    def __init__(self, plan: Plan) -> None:
        workload, configs = plan.job.workload, plan.lattice.configs
        sizes = [c.number("micro_batch") for c in configs]
        accumulation = [max(1, workload.batch_per_device // size) for size in sizes]
        # Users' programs run every micro-step of a step.
        whole_steps = workload.program is not None
        run = accumulation if whole_steps else list(map(micro_steps_run, accumulation, configs))
        self._setup = LogLinear(plan.lattice, SETUP)
        self._micro_steps = np.array(run)
        self._shares = self._micro_steps / np.array(accumulation)
        """The share of an optimizer step's seconds that a trial's step takes."""
        self._mixed = [Mixed.of(config, workload) for config in configs]
        self._row_of = plan.lattice.row_of

    def use(self, predictions: Mapping[Config, Prediction]) -> None:
        """Take the update's part of each step as predicted: a trial's step has all of it, but few micro-steps."""
        for config, prediction in predictions.items():
            if prediction.micro_step_seconds and prediction.step_seconds and config in self._row_of:
                row = self._row_of[config]
                accumulation = self._micro_steps[row] / self._shares[row]
                micro = min(1.0, prediction.micro_step_seconds * accumulation / prediction.step_seconds)
                self._shares[row] += (1.0 - micro) * (1.0 - self._shares[row])

    def seconds(self, trials: Mapping[Config, Trial], rows: Rows, step_seconds: Array) -> Array:
        """Expected seconds of the trials at `rows`, whose optimizer steps take `step_seconds`; `trials` show how long
        set-ups take."""
        observed = [(c, math.log(s)) for c, t in trials.items() if c in self._row_of and (s := self._setup_seconds(t))]
        setup = np.exp(self._setup.predict_rows(observed, rows).mean)
        steps = self._shares[rows] * step_seconds
        mixed_by_row = [self._mixed[row] for row in rows]
        trial_steps = zip(steps.tolist(), self._micro_steps[rows].tolist(), mixed_by_row, strict=True)
        running = [running_seconds(step, TIMING_SECONDS, micro, mixed) for step, micro, mixed in trial_steps]
        return np.asarray(setup + running)

    def _setup_seconds(self, trial: Trial) -> float | None:
        """Seconds before the warm-up, at least a tenth. For a trial that was killed before any step, its deadline."""
        if measurement := trial.measurement:
            row = self._row_of[trial.config]
            step = float(self._shares[row] * measurement.step_seconds.median)
            warm_up = self._mixed[row].warm_up_seconds(step, int(self._micro_steps[row]))
            return max(measurement.setup_seconds - warm_up, 0.1)
        if isinstance(trial.outcome, TimedOut) and trial.outcome.least_step_seconds is None:
            return max(trial.outcome.deadline_seconds, 0.1)
        return None
