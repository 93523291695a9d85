"""Devices that do not exist: recorded tables as they would be where techniques are slow, speed is noisy or drifts.

A search on one is told the predictions of the honest device: that they are wrong is the point.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from autofit.bench.oracle import Cut, Enough, Oracle, Trace, drawn_again
from autofit.bench.ours import search
from autofit.bench.recorded import Recorded
from autofit.core.frontier import PRACTICAL, Point
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Trial
from autofit.search.budget import TIMING_SECONDS
from autofit.techniques.axes.sharding import micro_steps_run
from autofit.trial.measure.pace import least_repeats, warm_ups

BUDGET_SECONDS = 600.0
"""The command's default."""
UNDECIDED = 1.25
"""Factor by which a method may miss the share of speed that makes it practical, or exceed it, so that noise may decide
either way."""


@dataclass(frozen=True, kw_only=True)
class MadeDevice:
    """How a device differs from the one that a table was recorded on."""

    slow: Mapping[tuple[tuple[str, Any], ...], float] = field(default_factory=dict)
    """How many times as long the steps take of the configs that have all of these values, each with its axis."""
    noise: float = 0.0
    """Standard deviation of the logarithm of speed between executions; no trial shows it by itself."""
    drift: int | None = None
    """The number of trials by which steps have come to take twice as long."""

    def factor(self, config: Config) -> float:
        """How many times as long a config's steps take, before the device drifts."""
        return math.prod(
            factor for values, factor in self.slow.items() if all(config.get(axis) == value for axis, value in values)
        )

    def recorded(self, recorded: Recorded) -> Recorded:
        """The table of this device."""
        trials = {config: slower(trial, self.factor(config)) for config, trial in recorded.trials.items()}
        return replace(recorded, trials=trials)


class _Drifting(Oracle):
    """Answers a search on a device that slows down, or whose executions differ."""

    def __init__(self, recorded: Recorded, seed: int, device: MadeDevice) -> None:
        super().__init__(recorded, seed)
        self._drift, self._noise = device.drift or math.inf, device.noise

    def ask(self, config: Config, cut: Cut = lambda trial: trial, *, again: bool = False) -> Trial:
        factor = 1.0 + min(1.0, len(self._runs) / self._drift)
        return super().ask(config, lambda trial: cut(slower(trial, factor)), again=again)

    def _run(self, config: Config, cut: Cut) -> Trial:
        source = random.Random(f"{self._seed} {config.key} {self._times[config] + 1}")
        drawn_again(self._recorded.trials[config].outcome, source)  # as the oracle draws: what follows is the noise
        factor = math.exp(source.gauss(0.0, self._noise))
        return super()._run(config, lambda trial: cut(timed(trial, factor)))


def searched(recorded: Recorded, device: MadeDevice, seed: int) -> tuple[Recorded, Trace]:
    """Our search on a made device, of which `recorded` is the honest table; with the device's own table."""
    made = device.recorded(recorded)
    oracle = _Drifting(made, seed, device)
    try:
        return made, oracle.trace(
            stated=search(made.problem, oracle, seed, budget_seconds=BUDGET_SECONDS), stopped=True
        )
    except Enough:
        return made, oracle.trace(stopped=False)


def practical(recorded: Recorded) -> list[Point]:
    """The fastest config of the method to recommend: the most faithful one that has at least `PRACTICAL` of the speed
    of the next that fits. Those of two methods where that is `UNDECIDED`."""
    fitting = {p.method for p in recorded.points}
    bests = [recorded.best_of(method) for method in recorded.problem.methods if method in fitting]
    result: list[Point] = []
    for best, following in pairwise([*bests, None]):
        share = math.inf
        if following is not None:
            share = best.measurement.tokens_per_second / following.measurement.tokens_per_second / PRACTICAL
        if share >= 1.0 / UNDECIDED:
            result.append(best)
        if share >= UNDECIDED:
            break
    return result


def timed(trial: Trial, factor: float) -> Trial:
    """The trial with `factor` times the step time, in the same seconds; unchanged unless it fits."""
    if not isinstance(trial.outcome, Fits):
        return trial
    return replace(trial, outcome=Fits(measurement=trial.outcome.measurement.slowed(factor)))


def slower(trial: Trial, factor: float) -> Trial:
    """The trial on a device on which its steps take `factor` times as long; unchanged unless it fits. Of its repeats
    are left as many as there is time for. The seconds of a trial that ran out of memory stay."""
    if factor == 1.0 or not isinstance(trial.outcome, Fits):
        return trial
    measured = trial.outcome.measurement
    steps = measured.step_seconds
    accumulation = trial.workload.batch_per_device // trial.config.number("micro_batch")
    micro_steps = micro_steps_run(accumulation, trial.config)
    before = warm_ups(steps.median * micro_steps / accumulation)
    ran = before + measured.steps
    step = micro_steps * min(steps.median / accumulation, trial.seconds / (ran * micro_steps))
    now = factor * step
    repeats = max(min(least_repeats(now), measured.steps), min(measured.steps, int(TIMING_SECONDS / now)))
    warm_up = warm_ups(now) * now - before * step
    return replace(
        trial,
        seconds=max(0.0, trial.seconds - ran * step) + (warm_ups(now) + repeats) * now,
        outcome=Fits(
            measurement=replace(
                measured.slowed(factor),
                steps=repeats,
                losses=measured.losses[: warm_ups(now) + repeats],
                setup_seconds=max(measured.setup_seconds + warm_up, 0.0),
            )
        ),
    )
