"""Tables of earlier versions have several passes over a space: one trial per config, with the spread to expect."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Trial
from autofit.core.repeatability import INTERVAL_DEVIATIONS


def pooled(trials: Mapping[Config, Sequence[Trial]]) -> dict[Config, Trial]:
    """One trial per config: the only one if it ran once and, if it ran several times,

    * the first that did not fit, if there is one: the cautious reading of contradictory results;
    * otherwise the one of median speed, with the geometric mean of all speeds. Its spread is the width of the 90 %
      interval for one more trial, from how much the passes differ over all configs: the pooled variance of the
      logarithms (Snedecor and Cochran 1989, section 6.5).

    Its seconds are the mean over the passes.
    """
    deviation = _deviation(trials.values())
    return {config: _pooled_trial(passes, deviation) for config, passes in trials.items()}


def _pooled_trial(passes: Sequence[Trial], deviation: float) -> Trial:
    if len(passes) == 1:
        return passes[0]
    seconds = statistics.fmean(trial.seconds for trial in passes)
    failed = next((trial for trial in passes if trial.measurement is None), None)
    if failed is not None:
        return replace(failed, seconds=seconds)
    speeds = _speeds(passes)
    middle = passes[speeds.index(statistics.median_low(speeds))]
    measured = middle.measurement
    assert measured is not None
    measured = measured.slowed(measured.tokens_per_second / statistics.geometric_mean(speeds))
    steps = replace(measured.step_seconds, relative_spread=INTERVAL_DEVIATIONS * deviation)
    return replace(middle, outcome=Fits(measurement=replace(measured, step_seconds=steps)), seconds=seconds)


def _deviation(repeated: Iterable[Sequence[Trial]]) -> float:
    """Pooled standard deviation of the logarithm of speed between trials of one config; 0 if none has fitted twice."""
    squares, freedom = 0.0, 0
    for passes in repeated:
        logarithms = [math.log(speed) for speed in _speeds(passes)]
        if len(logarithms) > 1:
            squares += statistics.variance(logarithms) * (len(logarithms) - 1)
            freedom += len(logarithms) - 1
    return math.sqrt(squares / freedom) if freedom else 0.0


def _speeds(passes: Iterable[Trial]) -> list[float]:
    """Tokens per second of those that fit."""
    return [measured.tokens_per_second for trial in passes if (measured := trial.measurement) is not None]
