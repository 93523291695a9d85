"""Our own search, as `autofit search` runs it, over a recorded table."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial

from autofit.bench.oracle import CannotRun, Oracle, Stated
from autofit.bench.problem import Problem
from autofit.catalog.models import load
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.errors import AutofitError
from autofit.core.lattice import Config, Lattice
from autofit.core.outcome import Fits, TimedOut, Trial
from autofit.core.workload import Effect, Goal
from autofit.estimate.memory.lower_bound import floor_bytes
from autofit.planning.plan import Limits, Plan
from autofit.prediction.predictions import ReadyMade
from autofit.search.loop import SearchLoop
from autofit.store.trial_log import TrialLog
from autofit.techniques import AXES, Job, holds
from autofit.techniques.axes.sharding import micro_steps_run
from autofit.trial.attempt import Attempt
from autofit.trial.measure.pace import ONCE_SECONDS, Pace, TooSlow, warm_ups
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed, Pool


def search(
    problem: Problem, oracle: Oracle, seed: int, *, thorough: bool = False, budget_seconds: float | None = None
) -> Stated | None:
    """The search with an empty store and the estimator's predictions. Nothing in it is random but the order of the
    configs, which breaks ties. The winner's second run, which no rival has, is counted in its cost.

    `thorough`: it goes on for the frontier once the best config is found. `budget_seconds` is used up by trials alone.
    """
    job, configs = job_of(problem), list(problem.configs)
    random.Random(seed).shuffle(configs)
    pool = ReplayPool(job=job, oracle=oracle)
    replayed = SearchLoop(
        plan=Plan(
            job=job,
            lattice=Lattice(axes=AXES, configs=tuple(configs), holds=holds(job)),
            lower_bounds={config: floor_bytes(config, job) for config in configs},
            goal=Goal(method=problem.method, allow=Effect.TRAINING),
            limits=Limits(memory_bytes=problem.memory_limit_bytes, seconds=budget_seconds),
            thorough=thorough,
        ),
        predictor=ReadyMade(problem.predictions),
        log=TrialLog(),
        open_pool=lambda: pool,
        clock=lambda: pool.seconds,
    )
    replayed.run()
    winner, bound = replayed.winner(), replayed.progress.regret_bound
    return None if winner is None or bound is None else Stated(config=winner.config, regret_bound=bound)


def job_of(problem: Problem) -> Job:
    """The job that was recorded. Raises `CannotRun` if its model is not available here."""
    workload = problem.workload
    try:
        model = load(workload.model)
    except AutofitError as error:
        raise CannotRun(f"it needs the architecture that was recorded: {error}") from error
    if model.digest != workload.model_digest:
        raise CannotRun(f"{workload.model} has a different architecture here from the one that was recorded")
    return Job(model=model, workload=workload, hardware=problem.hardware, stack=problem.stack)


@dataclass(slots=True, kw_only=True)
class ReplayPool(Pool):
    """A worker whose trials are looked up, and take their recorded seconds of the pool's own time."""

    job: Job
    oracle: Oracle
    size: int = 1
    seconds: float = 0.0
    """The pool's time: since the first trial could begin."""
    _running: list[Completed] = field(default_factory=list)

    def site(self) -> tuple[Hardware, Stack]:
        return self.job.hardware, self.job.stack

    def cannot(self, config: Config, job: Job) -> str | None:
        return None

    def submit(self, request: TrialRequest) -> None:
        """Look the trial up; a config that is submitted twice is meant to run twice."""
        trial = self.oracle.ask(request.config, partial(cut, request=request), again=True)
        self._running.append((request, Attempt(outcome=trial.outcome, seconds=trial.seconds)))

    def wait(self, timeout: float) -> list[Completed]:
        """The running trial, which has ended."""
        ended, self._running = self._running, []
        self.seconds += sum(attempt.seconds for _, attempt in ended)
        return ended

    def close(self) -> None:
        """There is nothing to free."""


def cut(trial: Trial, request: TrialRequest) -> Trial:
    """`trial` as it is where it would have ended by itself; else as its pace or its deadline would have ended it.

    Then its outcome is `TimedOut`, with what its micro-steps had shown until then of a whole step's time, and it has
    cost the seconds until then. Its steps take what was measured of them, each micro-step an equal share of its step;
    the rest of its seconds came before. Where a busy moment made its median longer than that leaves room for, all of
    its seconds were steps.
    """
    if not isinstance(trial.outcome, Fits):
        return _killed(trial, request.deadline_seconds)
    median, timed = trial.outcome.measurement.step_seconds.median, trial.outcome.measurement.steps
    accumulation = trial.workload.batch_per_device // trial.config.number("micro_batch")
    micro_steps = micro_steps_run(accumulation, trial.config)
    watched = micro_steps * warm_ups(median * micro_steps / accumulation)
    total_micro_steps = watched + micro_steps * timed
    micro_seconds = min(median / accumulation, trial.seconds / total_micro_steps)
    elapsed, least_step_seconds = max(0.0, trial.seconds - total_micro_steps * micro_seconds), 0.0
    # What was recorded is a mean micro-step.
    pace = replace(Pace.of(request, accumulation), least_share=1.0, mean_share=1.0)
    for number in range(1, watched + 1):
        ends = request.limit_seconds(earned=pace.earned)
        if elapsed + micro_seconds > ends:
            begun = accumulation * max(0.0, ends - elapsed - ONCE_SECONDS)
            return _killed(trial, ends, max(least_step_seconds, begun) or None, is_proven=least_step_seconds > begun)
        elapsed += micro_seconds
        micro_steps_left = max(0, micro_steps - number) + micro_steps
        try:
            judgement = pace.judge(number, micro_seconds, elapsed_seconds=elapsed, micro_steps_left=micro_steps_left)
        except TooSlow as slow:
            return replace(trial, outcome=slow.outcome(after_seconds=elapsed), seconds=elapsed)
        least_step_seconds = judgement.least_step_seconds or least_step_seconds
    ends = request.limit_seconds(earned=pace.earned)
    return _killed(trial, ends, least_step_seconds or None, is_proven=least_step_seconds > 0.0)


def _killed(trial: Trial, after: float, least_step_seconds: float | None = None, *, is_proven: bool = False) -> Trial:
    if trial.seconds <= after:
        return trial
    outcome = TimedOut(
        reason=f"not done after its {after:.0f} s",
        deadline_seconds=after,
        least_step_seconds=least_step_seconds,
        is_proven=is_proven,
    )
    return replace(trial, outcome=outcome, seconds=after)
