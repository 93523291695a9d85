"""What trials cost: set-up, warm-up, timed steps and updates, as they really run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from autofit.core.lattice import Config, Lattice
from autofit.core.outcome import Prediction, TimedOut, Trial
from autofit.search.acquisition.surrogate import SETUP, Array, LogLinear, Rows
from autofit.search.budget import TIMING_SECONDS
from autofit.trial.measure.pace import FULL, Mixed, micro_steps_run, running_seconds


class TrialCosts:
    """The expected seconds of the trials of one lattice's configs."""

    def __init__(
        self,
        lattice: Lattice,
        batch: int,
        mixed: Callable[[int], Mixed] = lambda micro_batch: FULL,
        *,
        whole_steps: bool = False,
    ) -> None:
        """`batch`: sequences of a device's optimizer step; `mixed`: of steps with some micro-batch. `whole_steps`: a
        trial runs every micro-step of a step, as users' programs do."""
        self._setup = LogLinear(lattice, SETUP)
        accumulation = np.array([max(1, batch // c.number("micro_batch")) for c in lattice.configs])
        self._micro_steps = np.array(
            [
                int(each) if whole_steps else micro_steps_run(int(each), c)
                for each, c in zip(accumulation, lattice.configs, strict=True)
            ]
        )
        self._shares = self._micro_steps / accumulation
        """Of an optimizer step's seconds, those that a trial's step takes."""
        self._mixed = [mixed(c.number("micro_batch")) for c in lattice.configs]
        self._row_of = lattice.row_of

    def use(self, predictions: Mapping[Config, Prediction]) -> None:
        """Take the update's part of each step as predicted: a trial's step has all of it, but few micro-steps."""
        for config, said in predictions.items():
            if said.micro_step_seconds and said.step_seconds and config in self._row_of:
                row = self._row_of[config]
                accumulation = self._micro_steps[row] / self._shares[row]
                micro = min(1.0, said.micro_step_seconds * accumulation / said.step_seconds)
                self._shares[row] += (1.0 - micro) * (1.0 - self._shares[row])

    def seconds(self, trials: Mapping[Config, Trial], rows: Rows, step_seconds: Array) -> Array:
        """Expected seconds of the trials at `rows`, whose optimizer steps take `step_seconds`; `trials` show how long
        set-ups take."""
        known = [(c, math.log(s)) for c, t in trials.items() if c in self._row_of and (s := self._set_up_in(t))]
        setup = np.exp(self._setup.predict_rows(known, rows).mean)
        steps = self._shares[rows] * step_seconds
        each = zip(steps.tolist(), self._micro_steps[rows].tolist(), [self._mixed[row] for row in rows], strict=True)
        return np.asarray(setup + [running_seconds(step, TIMING_SECONDS, micro, mixed) for step, micro, mixed in each])

    def _set_up_in(self, trial: Trial) -> float | None:
        """Seconds before the warm-up, at least a tenth. A trial that was killed before any step is one that took as
        long."""
        if measured := trial.measurement:
            row = self._row_of[trial.config]
            step = float(self._shares[row] * measured.step_seconds.median)
            warm_up = self._mixed[row].warm_up_seconds(step, int(self._micro_steps[row]))
            return max(measured.setup_seconds - warm_up, 0.1)
        if isinstance(trial.outcome, TimedOut) and trial.outcome.least_step_seconds is None:
            return max(trial.outcome.deadline_seconds, 0.1)
        return None
