"""Optuna's own samplers, told of the constraint as their documentation recommends.

The objectives are those of a user who wants the fastest config (tokens per second) or, for `-frontier`, of one who
wants the frontier (device memory and tokens per second). Where training methods are searched side by side, tokens per
second count more for the more faithful ones (`Problem.merit`), which is what the first of these users wants. The
parameters are the axes on which a problem's configs differ: numeric ones (micro-batch, rank) as an integer index into
their values, all others as categories. One that does not apply to the training method asked for is ignored.

A trial that fits has the constraint (its memory - limit) / limit. One that does not is told as completed, with finite
worst values (no speed, twice the limit) and a violated constraint: GPSampler ignores pruned and failed trials, and
would ask for the same config again. A suggestion that is not in the table gets the outcome of the nearest config.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection

from autofit.core.distribution import install
from autofit.lattice import Axis, Config, Value
from autofit.outcome import Fits, Outcome
from autofit.search.replay.method import CannotRun, SearchMethod
from autofit.search.replay.oracle import Oracle
from autofit.search.replay.problem import Problem

OVER_LIMIT = "over_limit"
"""Name of the constraint: feasible where it is at most 0."""
SPEED = (StudyDirection.MAXIMIZE,)
FRONTIER = (StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE)


def rival(make: Callable[[int], BaseSampler], directions: tuple[StudyDirection, ...] = SPEED) -> SearchMethod:
    """The search by the sampler that `make` builds from a seed."""

    def search(problem: Problem, oracle: Oracle, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna's about experimental features, SciPy's about sample sizes
            try:
                _search(problem, oracle, optuna.create_study(directions=directions, sampler=make(seed)))
            except ImportError as error:
                raise CannotRun(f"{error}: Optuna's sampler needs it ({install('bench')})") from error

    return search


RIVALS: Mapping[str, SearchMethod] = {
    "optuna-random": rival(lambda seed: optuna.samplers.RandomSampler(seed=seed)),
    "optuna-qmc": rival(lambda seed: optuna.samplers.QMCSampler(seed=seed, scramble=True)),
    "optuna-tpe": rival(lambda seed: optuna.samplers.TPESampler(seed=seed)),
    "optuna-tpe-frontier": rival(lambda seed: optuna.samplers.TPESampler(seed=seed), FRONTIER),
    "optuna-gp": rival(lambda seed: optuna.samplers.GPSampler(seed=seed)),
    "optuna-gp-frontier": rival(lambda seed: optuna.samplers.GPSampler(seed=seed), FRONTIER),
    "optuna-nsga2": rival(lambda seed: optuna.samplers.NSGAIISampler(seed=seed), FRONTIER),
}
"""All settings are the samplers' defaults, except that QMC's sequence is scrambled: otherwise all seeds are alike."""


def _search(problem: Problem, oracle: Oracle, study: optuna.Study) -> None:
    axes = [(axis, problem.values(axis)) for axis in problem.axes]
    space = {axis.name: _distribution(axis, values) for axis, values in axes}
    while True:
        trial = study.ask(space)
        config = _config(problem, axes, trial.params)
        memory, speed, over = _told(oracle.ask(config).outcome, problem.memory_limit_bytes)
        trial.set_constraint(OVER_LIMIT, over)
        study.tell(trial, [problem.merit(config, speed)] if len(study.directions) == 1 else [memory, speed])


def _distribution(axis: Axis, values: tuple[Value, ...]) -> BaseDistribution:
    return IntDistribution(0, len(values) - 1) if axis.numeric else CategoricalDistribution(values)


def _config(problem: Problem, axes: list[tuple[Axis, tuple[Value, ...]]], params: Mapping[str, Any]) -> Config:
    """The config that the parameters encode."""
    return problem.config({a.name: values[params[a.name]] if a.numeric else params[a.name] for a, values in axes})


def _told(outcome: Outcome, limit: int) -> tuple[float, float, float]:
    """Bytes, tokens per second, and the constraint."""
    if isinstance(outcome, Fits):
        measured = outcome.measurement
        return float(measured.device_bytes), measured.tokens_per_second, measured.device_bytes / limit - 1.0
    return 2.0 * limit, 0.0, 1.0
