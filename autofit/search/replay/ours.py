"""Our own search, as `autofit search` runs it, over a recorded table."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from autofit.catalog.models import load
from autofit.errors import AutofitError
from autofit.estimate.floor import floor_bytes
from autofit.hardware import Hardware, Stack
from autofit.lattice import Config, Lattice
from autofit.search.budget import Limits
from autofit.search.foresight import Foresight
from autofit.search.loop import Search
from autofit.search.replay.cut import cut
from autofit.search.replay.method import CannotRun
from autofit.search.replay.oracle import Oracle
from autofit.search.replay.problem import Problem
from autofit.search.replay.trace import Stated
from autofit.techniques import AXES, Job, holds
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed
from autofit.workload import Effect, Goal


def search(problem: Problem, oracle: Oracle, seed: int) -> None:
    """The search with an empty store and the estimator's predictions. Nothing in it is random but the order of the
    configs, which breaks ties. The winner's second run, which no rival has, is counted in its cost."""
    _search(problem, oracle, seed, problem.foresee)


def search_warm(problem: Problem, oracle: Oracle, seed: int) -> None:
    """The same on a machine whose store has the trials of all other tables. Raises `CannotRun` if there are none."""
    foresight = problem.foresee_warm()
    if foresight is None:
        raise CannotRun("no other table is of this hardware")
    _search(problem, oracle, seed, lambda: foresight)


def search_thoroughly(problem: Problem, oracle: Oracle, seed: int) -> None:
    """`autofit search --thorough`, which goes on for the frontier once the best config is found."""
    _search(problem, oracle, seed, problem.foresee, thorough=True)


def search_on(pool: ReplayPool, problem: Problem, seed: int, *, budget_seconds: float | None = None) -> None:
    """`search` on the workers of this pool, with a time budget that trials alone use up."""
    _search(problem, pool.oracle, seed, problem.foresee, pool=pool, budget_seconds=budget_seconds)


def _search(
    problem: Problem,
    oracle: Oracle,
    seed: int,
    foresee: Callable[[], Foresight],
    *,
    thorough: bool = False,
    pool: ReplayPool | None = None,
    budget_seconds: float | None = None,
) -> None:
    job = job_of(problem)
    pool = pool or ReplayPool(job, oracle, devices=job.workload.devices)
    configs = list(problem.configs)
    random.Random(seed).shuffle(configs)
    found = Search(
        job=job,
        lattice=Lattice(axes=AXES, configs=tuple(configs), holds=holds(job)),
        methods=problem.methods,
        goal=Goal(method=problem.method, allow=Effect.TRAINING),
        limits=Limits(memory_bytes=problem.memory_limit_bytes, seconds=budget_seconds),
        floor=lambda config: floor_bytes(config, job),
        known={},
        open_pool=lambda: pool,
        foresee=lambda told: foresee(),
        save=lambda trial: trial,
        thorough=thorough,
        clock=pool.now,
    )
    found.run()
    winner, bound = found.winner(), found.progress.regret_bound
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


@dataclass(slots=True)
class ReplayPool:
    """Workers whose trials are looked up. They end in the order that their recorded seconds give."""

    job: Job
    oracle: Oracle
    size: int = 1
    devices: int = 1
    """Devices of each recorded trial."""
    ran: list[tuple[float, float]] = field(default_factory=list)
    """When each trial began and ended, in the order asked: seconds since the first began."""
    _now: float = 0.0
    _begun: set[Config] = field(default_factory=set)
    _running: list[tuple[float, int, Completed]] = field(default_factory=list)
    """A heap: each with the time of its end, and its number."""

    def now(self) -> float:
        """Seconds of trials so far."""
        return self._now

    def site(self) -> tuple[Hardware, Stack]:
        """Where the table was recorded."""
        return self.job.hardware, self.job.stack

    def cannot(self, config: Config, job: Job) -> str | None:
        """Nothing: configs that cannot work were recorded as such."""
        return None

    def submit(self, request: TrialRequest) -> None:
        """Look the trial up; a config that is submitted twice is meant to run twice."""
        again = request.config in self._begun
        self._begun.add(request.config)
        look_up = self.oracle.run_again if again else self.oracle.ask
        answer = look_up(request.config, partial(cut, request=request))
        done = Completed(request=request, outcome=answer.outcome, seconds=answer.seconds)
        self.ran.append((self._now, self._now + answer.seconds))
        heappush(self._running, (self.ran[-1][1], len(self.ran), done))

    def wait(self, timeout: float) -> list[Completed]:
        """The next trial to end."""
        if not self._running:
            return []
        self._now, _, done = heappop(self._running)
        return [done]

    def close(self) -> None:
        """There is nothing to free."""
