"""What a search knows before its first trial: the estimator's predictions, and how far off they have been here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from autofit.core.lattice import Config
from autofit.core.outcome import Fits, OutOfMemory, Prediction, Trial
from autofit.estimate.version import is_current
from autofit.search.acquisition.step_times import LEAST_EFFECT
from autofit.search.acquisition.surrogate import TIME, Prior, mean_above

LEAST_LEVEL = 0.1
"""Least deviation of the logarithm of a device's overall speed from the predicted one: a machine changes by as much
from one hour to the next (benchmarks/README.md, one config ten times)."""
UNKNOWN = 0.12
"""Deviation of the logarithm of measured over predicted memory on hardware where nothing was compared yet. The worst
recorded errors (benchmarks/recorded) are 0.002 of what is allocated on one card and 0.073 on two
(published-estimates.json), and 0.22 of what a processor's trials took (estimate-cpu.json): all within two of these
deviations. A processor's compiled trials, off by up to 0.37 there, and those sharded over its ranks, which are off
by up to 0.38 (cpu-zen5-2c-sharded-memory.json), are not."""
WORTH = 3.0
"""How many comparisons `UNKNOWN` is worth, and how many of a search's own comparisons all earlier ones together are
worth."""
LEAST = 0.01
"""Deviation below which no number of comparisons takes it: two runs of one config differ by that much."""


def time_error(relative_error: float) -> Prior:
    """Prior for the logarithm of measured over predicted step time, given the error that predictions state.

    The device's overall speed is off by what is stated. So are the effects of axis values, but by no more than where
    nothing is predicted: even a guess from a data sheet knows that much.
    """
    stated = max(relative_error, LEAST_EFFECT)
    known_less = {axis: min(stated, spread) for axis, spread in TIME.spread_of.items()}
    level = max(math.log1p(relative_error), LEAST_LEVEL)
    return Prior(intercept_spread=level, spread=min(stated, TIME.spread), spread_of=known_less, noise=TIME.noise)


def memory_error(deviation: float, mean: float = 0.0) -> Prior:
    """Prior for the logarithm of measured over predicted memory: most of it is common to all configs, and each axis has
    its share of the rest."""
    deviation = max(deviation, LEAST)
    return Prior(
        intercept=mean,
        intercept_spread=deviation,
        spread=deviation / 3,
        noise=max(deviation / 5, LEAST),
        weight=WORTH,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """The predictions for a lattice and their expected error; without any, a search learns from its trials alone."""

    predictions: Mapping[Config, Prediction] = field(default_factory=dict)
    memory_error: Prior = field(default_factory=lambda: memory_error(UNKNOWN))
    beyond_host: Mapping[Config, int] = field(default_factory=dict)
    """The configs that need more host memory than a machine has, with the bytes that are missing."""
    host_bytes: Mapping[Config, int] = field(default_factory=dict)
    """Host memory that a trial of each config takes on one machine, all of its ranks together."""
    shared_host_bytes: int | None = None
    """Host memory of the one machine that all trials share; None where each may have its own machine, or the machine's
    memory is not known."""

    def held_beside(self, config: Config, running: Iterable[Config]) -> bool:
        """Whether the host is predicted to have memory for a trial of `config` alongside the running ones.

        That is the case if the predicted bytes of all of them together are within its memory. A config without a
        prediction counts as nothing. One that fits alongside no other is not ruled out: its trial only has to wait
        until it can run alone.
        """
        together = sum(self.host_bytes.get(one, 0) for one in (config, *running))
        return self.shared_host_bytes is None or together <= self.shared_host_bytes

    def errors_of_memory(self) -> tuple[Prior, dict[Config, float]]:
        """The error to expect of all predicted memory, and the deviations that formulas add for single configs.

        Where no config was traced, all share the formula's error, and a few trials show it.
        """
        formulas = {c: math.log1p(p.memory_error) for c, p in self.predictions.items() if p.memory_error > 0}
        if len(formulas) < len(self.predictions) or not formulas:
            return self.memory_error, formulas
        deviation = max(*formulas.values(), self.memory_error.intercept_spread)
        return memory_error(deviation, self.memory_error.intercept), {}


def learned(trials: Iterable[Trial]) -> Prior:
    """The memory error to expect, from trials with predictions on the same hardware, of any workload."""
    mean, deviation = normal_of(memory_errors(trials))
    return memory_error(deviation, mean)


def memory_errors(trials: Iterable[Trial]) -> list[float]:
    """The logarithm of measured over predicted memory of each trial whose prediction this version traced.

    For a trial that ran out of memory, its limit gives only a lower bound: it counts as what is to be expected above
    that bound, and not at all where it was to be expected to run out.
    """
    errors, ran_out = [], []
    for trial in trials:
        said = trial.prediction
        if said is None or said.device_bytes <= 0 or said.memory_error > 0 or not is_current(said):
            continue  # a formula's error says nothing about that of traces
        predicted = math.log(said.device_bytes)
        if isinstance(trial.outcome, Fits):
            if trial.outcome.measurement.device_bytes > 0:  # on the CPU a tiny model may take none beyond the imports
                errors.append(math.log(trial.outcome.measurement.device_bytes) - predicted)
        elif ran_out_on_device(trial):
            ran_out.append(math.log(trial.memory_limit_bytes) - predicted)
    mean, deviation = normal_of(errors)
    return errors + [mean_above(least, mean, deviation) for least in ran_out if least > mean]


def normal_of(errors: list[float]) -> tuple[float, float]:
    """Mean and deviation of a normal variable with both unknown (Gelman 2013, section 3.3), from the draws seen plus
    `WORTH` imaginary ones of what is expected where nothing was compared."""
    count = len(errors)
    if not count:
        return 0.0, UNKNOWN
    seen = float(np.mean(errors))
    squares = WORTH * UNKNOWN**2 + count * float(np.var(errors)) + WORTH * count / (WORTH + count) * seen**2
    return count * seen / (WORTH + count), math.sqrt(squares / (WORTH + count))


def ran_out_on_device(trial: Trial) -> bool:
    """Whether it was the device's memory that ran out: that is the one which predictions are about."""
    return isinstance(trial.outcome, OutOfMemory) and not trial.outcome.host
