"""A recorded table of which the search is told what was recorded: the honest device's beliefs, without an estimator."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from autofit.bench.recorded import Recorded
from autofit.bench.tables import RECORDED, problems_of, read
from autofit.core.lattice import Lattice
from autofit.core.outcome import Fits, Trial
from autofit.core.prediction import Prediction
from autofit.prediction.predictions import Predictions
from autofit.search.acquisition.memory_fit import guesses
from autofit.search.acquisition.surrogate import TIME
from autofit.techniques import AXES

TABLE = "cpu-2c-smollm2-135m"


@cache
def problems() -> dict[str, Recorded]:
    """The problems of the table by training method, with these predictions."""
    every = problems_of(read([RECORDED / f"{TABLE}.jsonl"]))
    predictions = _predictions(next(r for r in every if r.problem.method == "any"))
    return {
        recorded.problem.method: replace(recorded, problem=replace(recorded.problem, predictions=predictions))
        for recorded in every
    }


def _predictions(every: Recorded) -> Predictions:
    """What was recorded, with the error that a guess states.

    Of what ran out of memory: a little above the limit, and the seconds that a fit to the others gives.
    """
    lattice = Lattice(axes=AXES, configs=every.problem.configs)
    timed = {
        config: math.log(trial.outcome.measurement.step_seconds.median)
        for config, trial in every.trials.items()
        if isinstance(trial.outcome, Fits)
    }
    seconds = timed | {config: mean for config, (mean, _) in guesses(lattice, timed, TIME).items()}
    return Predictions(by_config={c: _prediction(trial, math.exp(seconds[c])) for c, trial in every.trials.items()})


def _prediction(trial: Trial, seconds: float) -> Prediction:
    fitted = isinstance(trial.outcome, Fits)
    size = trial.outcome.measurement.device_bytes if fitted else round(1.1 * trial.memory_limit_bytes)
    return Prediction(
        peak_allocated_bytes=size, device_bytes=size, step_seconds=seconds, calibrated_on=0, relative_error=1.0
    )
