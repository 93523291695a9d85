"""The search's sampler for Optuna: it suggests the open config with the highest expected gain per second of trial."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState

from autofit.core.lattice import Config
from autofit.core.outcome import Crashed, Fits, Measurement, Outcome, OutOfMemory, StepSeconds, Trial, now
from autofit.search.acquisition.acquisition import Acquisition
from autofit.search.budget import TIMING_SECONDS
from autofit.search.lattice_state import LatticeState
from autofit.techniques import Job

DIRECTIONS = (StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE)
"""Of the study's two objectives: peak device bytes, tokens per second."""
ABSENT = "-"
"""Category of an axis that does not apply to a config (`rank` of a full fine-tuning)."""


class LatticeSampler(optuna.samplers.BaseSampler):
    """Suggests whole configs of the lattice, so that no suggestion is invalid, repeated or already ruled out.

    It works in any study of two objectives, peak device bytes down and tokens per second up: `study.ask(sampler.space)`
    gives the next config and marks it as under way. It raises `ValueError` in a study of other `DIRECTIONS`, and if no
    config is open.

    Without a `job`, whoever has an outcome calls `LatticeState.learn` before the study is told. With one, as for
    `study.optimize`, the study's own values are learnt: more bytes than the limit mean that the config ran out of
    memory, no values that its trial failed. The study then stops once no untried config is worth its trial. What was
    completed without this sampler is learnt, too; what other processes have under way may be suggested again.
    """

    def __init__(self, state: LatticeState, acquisition: Acquisition, job: Job | None = None) -> None:
        """`acquisition` must be based on the same state; `job` is what the study's trials train."""
        self._state = state
        self._acquisition = acquisition
        self._job = job
        self._lock = threading.Lock()
        self._taken: dict[int, Config] = {}
        """What was suggested for each of the study's running trials, by its number."""
        self._learnt: set[int] = set()
        """Numbers of the study's completed trials that need not be looked at again."""
        self.seconds_left: float | None = None
        """Configs whose trials are expected to take longer come last; None means no limit."""
        self.space: dict[str, BaseDistribution] = {}
        self._values: dict[str, tuple[Any, ...]] = {}
        for axis in state.lattice.axes:
            values = dict.fromkeys(ABSENT if c.get(axis.name) is None else c[axis.name] for c in state.lattice.configs)
            self._values[axis.name] = tuple(values)
            self.space[axis.name] = CategoricalDistribution(self._values[axis.name])

    def infer_relative_search_space(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self.space

    def sample_relative(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The config to run next, as Optuna's parameters."""
        if tuple(study.directions) != DIRECTIONS:
            names = ", ".join(direction.name.lower() for direction in study.directions)
            raise ValueError(
                f"the study's directions are {names}: create it with directions=['minimize', 'maximize'], for peak "
                "device bytes and tokens per second"
            )
        with self._lock:
            self._learn_completed(study)
            self.check_open()
            candidate = self._acquisition.best(self.seconds_left) or self._acquisition.first()
            self._state.take(candidate.config)
            self._taken[trial.number] = candidate.config
        return parameters(candidate.config, search_space)

    def config(self, trial: optuna.Trial) -> Config:
        """The config that the study's trial is to run, for an objective."""
        return suggested({name: trial.suggest_categorical(name, values) for name, values in self._values.items()})

    def check_open(self) -> None:
        """Raises `ValueError` if there is nothing left to suggest."""
        if not self._state.open:
            raise ValueError("every config of the lattice is measured, under way or ruled out")

    def after_trial(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Learn what the trial has shown, unless that has been learnt already; end `study.optimize` where nothing is
        worth a further trial."""
        config, taken = suggested(trial.params), self._taken.pop(trial.number, None)
        if self._job is None:
            return
        completed_values = values if state == TrialState.COMPLETE else None
        with self._lock:
            if taken is not None and taken != config:
                self._state.give_back(taken)  # the user enqueued some of the trial's parameters
            if config not in self._state or config in self._state.trials:
                return
            self._state.learn(self._trial(self._job, config, completed_values, _duration(trial)))
            done = self._acquisition.best() is None
        if done:
            with suppress(RuntimeError):  # raised where trials are asked for one by one: nothing runs that could stop
                study.stop()

    def _learn_completed(self, study: optuna.Study) -> None:
        """Learn what other processes have completed, or earlier ones, in a study that is continued."""
        if self._job is None:
            return
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            if trial.number in self._learnt:
                continue
            self._learnt.add(trial.number)
            config = suggested(trial.params) if trial.params.keys() == self.space.keys() else None
            state = self._state
            if config is not None and config in state and config not in state.trials and config not in state.under_way:
                state.learn(self._trial(self._job, config, trial.values, _duration(trial)))

    def _trial(self, job: Job, config: Config, values: Sequence[float] | None, seconds: float) -> Trial:
        limit = self._state.memory_limit_bytes
        outcome: Outcome
        if values is None:
            outcome = Crashed(reason="its trial in the study failed or was pruned")
        elif values[0] < 0 or not 0 <= values[1] < math.inf:
            outcome = Crashed(reason=f"the study was told what cannot be: {values[0]} bytes, {values[1]} tokens/s")
        elif values[0] > limit or values[1] == 0:
            outcome = OutOfMemory(reason="the study was told more bytes than the limit, or no speed")
        else:
            outcome = Fits(measurement=_measurement(int(values[0]), values[1], job.workload.tokens_per_step, seconds))
        return Trial(
            config=config,
            workload=job.workload,
            hardware=job.hardware,
            stack=job.stack,
            memory_limit_bytes=limit,
            outcome=outcome,
            seconds=seconds,
            recorded_at=now(),
        )

    def sample_independent(
        self,
        study: optuna.Study,
        trial: optuna.trial.FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Never needed: all axes are sampled together."""
        raise ValueError(f"{param_name} is not an axis of the lattice")


def parameters(config: Config, space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """A config as Optuna's parameters."""
    return {name: ABSENT if config.get(name) is None else config[name] for name in space}


def _duration(trial: optuna.trial.FrozenTrial) -> float:
    """Seconds since the study's trial began, or until it ended; 0 where its beginning is unknown."""
    if trial.datetime_start is None:
        return 0.0
    return ((trial.datetime_complete or datetime.now()) - trial.datetime_start).total_seconds()


def _measurement(device_bytes: int, tokens_per_second: float, tokens: int, seconds: float) -> Measurement:
    """A measurement of which only memory, speed, and the trial's duration are known."""
    median = tokens / tokens_per_second
    return Measurement(
        tokens_per_second=tokens_per_second,
        step_seconds=StepSeconds(median=median, p95=median, relative_spread=None),
        mfu=None,
        peak_allocated_bytes=device_bytes,
        peak_reserved_bytes=device_bytes,
        device_bytes=device_bytes,
        host_peak_bytes=0,
        host_baseline_bytes=0,
        phase_peaks={},
        losses=(),
        reference_loss=None,
        steps=1,
        setup_seconds=max(0.0, seconds - TIMING_SECONDS),
        overhead_seconds=0.0,
    )


def suggested(params: Mapping[str, Any]) -> Config:
    """The inverse of `parameters`."""
    return Config.of({name: value for name, value in params.items() if value != ABSENT})
