"""Optuna's own samplers, told of the constraint as their documentation recommends.

The objective is tokens per second, which count more for the more faithful training methods where several are searched
side by side (`Problem.merit`). The parameters are the axes on which a problem's configs differ: numeric ones
(micro-batch, rank) as an integer index into their values, all others as categories. One that does not apply to the
training method asked for is ignored.

A trial that fits has the constraint (its memory - limit) / limit. One that does not is told as completed, with the
finite worst value (no speed) and a violated constraint: GPSampler ignores pruned and failed trials, and would ask for
the same config again. A suggestion that is not in the table gets the outcome of the nearest config.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler

from autofit.bench.oracle import CannotRun, Oracle, SearchMethod
from autofit.bench.problem import Problem
from autofit.core.distribution import install
from autofit.core.outcome import Fits

OVER_LIMIT = "over_limit"
"""Name of the constraint: feasible where it is at most 0."""


def search(problem: Problem, oracle: Oracle, seed: int, *, sampler: Callable[..., BaseSampler]) -> None:
    """The search by one of Optuna's samplers, all of whose other settings are its defaults."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna's about experimental features
        try:
            _search(problem, oracle, optuna.create_study(direction="maximize", sampler=sampler(seed=seed)))
        except ImportError as error:
            raise CannotRun(f"{error}: Optuna's sampler needs it ({install('bench')})") from error


RIVALS: Mapping[str, SearchMethod] = {
    "optuna-random": partial(search, sampler=optuna.samplers.RandomSampler),
    "optuna-tpe": partial(search, sampler=optuna.samplers.TPESampler),
    "optuna-gp": partial(search, sampler=optuna.samplers.GPSampler),
}


def _search(problem: Problem, oracle: Oracle, study: optuna.Study) -> None:
    axes = [(axis, problem.values[axis.name]) for axis in problem.axes]
    space: dict[str, BaseDistribution] = {
        axis.name: IntDistribution(0, len(values) - 1) if axis.numeric else CategoricalDistribution(values)
        for axis, values in axes
    }
    while True:
        trial = study.ask(space)
        config = problem.config(
            {a.name: values[trial.params[a.name]] if a.numeric else trial.params[a.name] for a, values in axes}
        )
        outcome = oracle.ask(config).outcome
        speed, over = 0.0, 1.0
        if isinstance(outcome, Fits):
            measured = outcome.measurement
            speed, over = measured.tokens_per_second, measured.device_bytes / problem.memory_limit_bytes - 1.0
        trial.set_constraint(OVER_LIMIT, over)
        study.tell(trial, problem.merit(config, speed))
