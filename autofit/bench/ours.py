"""Our own search, as `autofit search` runs it, over a recorded table."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

from autofit.bench.cut import cut
from autofit.bench.oracle import CannotRun, Oracle, Stated
from autofit.bench.problem import Problem
from autofit.catalog.models import load
from autofit.core.errors import AutofitError
from autofit.core.hardware import Hardware, Stack
from autofit.core.lattice import Config, Lattice
from autofit.core.workload import Effect, Goal
from autofit.estimate.memory.lower_bound import floor_bytes
from autofit.planning.plan import Limits, Plan
from autofit.prediction.predictions import ReadyMade
from autofit.search.loop import Search
from autofit.store.trial_log import TrialLog
from autofit.techniques import AXES, Job, holds
from autofit.trial.attempt import Attempt
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed


def search(
    problem: Problem, oracle: Oracle, seed: int, *, thorough: bool = False, budget_seconds: float | None = None
) -> None:
    """The search with an empty store and the estimator's predictions. Nothing in it is random but the order of the
    configs, which breaks ties. The winner's second run, which no rival has, is counted in its cost.

    `thorough`: it goes on for the frontier once the best config is found. `budget_seconds` is used up by trials alone.
    """
    job = job_of(problem)
    pool = ReplayPool(job=job, oracle=oracle, devices=job.workload.devices)
    configs = list(problem.configs)
    random.Random(seed).shuffle(configs)
    replayed = Search(
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
    if winner is not None and bound is not None:
        oracle.hear(Stated(config=winner.config, regret_bound=bound))


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
class ReplayPool:
    """One worker whose trials are looked up."""

    job: Job
    oracle: Oracle
    devices: int
    """Of each recorded trial."""
    size: int = 1
    seconds: float = 0.0
    """Of trials so far."""
    _begun: set[Config] = field(default_factory=set)
    _running: list[Completed] = field(default_factory=list)

    def site(self) -> tuple[Hardware, Stack]:
        return self.job.hardware, self.job.stack

    def cannot(self, config: Config, job: Job) -> str | None:
        return None

    def submit(self, request: TrialRequest) -> None:
        """Look the trial up; a config that is submitted twice is meant to run twice."""
        again = request.config in self._begun
        self._begun.add(request.config)
        look_up = self.oracle.run_again if again else self.oracle.ask
        trial = look_up(request.config, partial(cut, request=request))
        self._running.append((request, Attempt(outcome=trial.outcome, seconds=trial.seconds)))

    def wait(self, timeout: float) -> list[Completed]:
        ended, self._running = self._running, []
        self.seconds += sum(attempt.seconds for _, attempt in ended)
        return ended

    def close(self) -> None:
        """There is nothing to free."""
