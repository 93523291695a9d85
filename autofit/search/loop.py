"""The search loop: ask, run, store, tell, until nothing untried can still win."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from autofit.frontier import Point, choose
from autofit.lattice import Config, Lattice
from autofit.outcome import Fits, Outcome, Trial
from autofit.search.adviser import Adviser
from autofit.search.exactness import FamilyLosses
from autofit.search.knowledge import Knowledge, verdict
from autofit.search.sampler import Candidate
from autofit.techniques import Job
from autofit.trial.request import TIMING_SECONDS as VERIFICATION_SECONDS
from autofit.trial.request import Rival, TrialRequest
from autofit.workers.pool import Pool

WORTHWHILE_GAIN = 0.01
"""Expected relative gain below which an untried config is not worth its trial: the noise of a measurement."""
TIMING_SECONDS = 4.0
"""Time spent on the repeats of one trial: enough to rank. The winner is timed for longer when it is verified."""
VERIFICATIONS = 3
"""Fresh runs spent at most on confirming the winner."""
HOPELESS_FAILURES = 12
"""Crashes, time-outs and divergences without a single fit after which something is broken that no config mends."""
POLL_SECONDS = 0.25


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a search stands, for whoever shows it. Updated in place by the loop."""

    candidates: int
    """Valid configs of the lattice."""
    done: int = 0
    """Trials run by this search."""
    out_of_memory: int = 0
    failed: int = 0
    """Trials that crashed, timed out or diverged."""
    ruled_out: int = 0
    """Configs that need not run, because a trial or the memory floor excludes them."""
    from_store: int = 0
    """Configs answered by earlier trials."""
    running: tuple[Config, ...] = ()
    best: Point | None = None
    """The best config so far, as the recommendation would choose it."""
    verifying: bool = False
    elapsed_seconds: float = 0.0
    left_seconds: float | None = None
    """Of the time budget; None without one."""
    stopped_because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search must end, whatever it has found."""

    memory_bytes: int
    max_trials: int | None = None
    seconds: float | None = None
    deadline_seconds: float = 600.0
    """Of one trial."""


@dataclass(slots=True, kw_only=True)
class Search:
    """One search over a lattice. `run` may be called once; what it learns stays in `knowledge` and in the store."""

    job: Job
    lattice: Lattice
    methods: tuple[str, ...]
    """The most faithful first."""
    limits: Limits
    floor: Callable[[Config], int]
    known: dict[Config, list[Trial]]
    """Earlier trials of this hardware, stack and workload."""
    open_pool: Callable[[], Pool]
    """Called at the first trial that must be run: a search that the store answers starts no worker."""
    save: Callable[[Trial], Trial]
    """Commits a trial, and returns it with its number."""
    report: Callable[[Progress], None] = lambda progress: None
    fresh: bool = False
    """Whether earlier trials are measured again."""
    answer_only: bool = False
    """Whether to run nothing, because an equal search has ended before."""
    knowledge: Knowledge = field(init=False)
    progress: Progress = field(init=False)
    _adviser: Adviser = field(init=False)
    _losses: FamilyLosses = field(init=False, default_factory=FamilyLosses)
    _fits: Counter[Config] = field(init=False, default_factory=Counter)
    """How often each config has been run and fitted."""
    _verifications: int = field(init=False, default=0)
    _pool: Pool | None = field(init=False, default=None)
    _started: float = field(init=False, default=0.0)

    def run(self) -> None:
        """Search until nothing untried can still win, or a limit is reached."""
        self._started = time.monotonic()
        self.knowledge = Knowledge(self.lattice, self.limits.memory_bytes)
        self.progress = Progress(candidates=len(self.lattice.configs))
        self._rule_out_by_floor()
        self._adviser = Adviser(self.knowledge, self.floor)
        if not self.fresh:
            self._recall()
        if self.answer_only:
            self.progress.stopped_because = "the same search has ended before"
            self._show()
            return
        try:
            self._explore()
            while self._verify():
                self._explore()  # a second figure of the winner may bring others back into play
            self._show()
        finally:
            if self._pool is not None:
                self._pool.close()

    def _rule_out_by_floor(self) -> None:
        for config in self.lattice.configs:
            least = self.floor(config)
            if least > self.limits.memory_bytes:
                self.knowledge.rule_out(config, f"weights, gradients and states alone take {least} bytes")
        self.progress.ruled_out = len(self.knowledge.ruled_out)

    def _recall(self) -> None:
        """Tell the adviser what the store knows."""
        for config in self.lattice.configs:
            trial = verdict(self.known.get(config, ()), self.limits.memory_bytes)
            if trial is not None:
                self._losses.checked(trial)
                self._fits[config] = sum(isinstance(t.outcome, Fits) for t in self.known[config])
                self._adviser.tell(trial)
                self.progress.from_store += 1
        self.progress.ruled_out = len(self.knowledge.ruled_out)
        self._show()

    def _explore(self) -> None:
        in_flight: list[Config] = []
        while True:
            while (candidate := self._next(len(in_flight))) is not None:
                config = self._adviser.ask(candidate)
                self._submit(config, TIMING_SECONDS, self._rivals(config))
                in_flight.append(config)
            if not in_flight:
                return
            for trial in self._collect(in_flight):
                self.progress.ruled_out += self._adviser.tell(trial)
            self._show(in_flight)

    def _next(self, in_flight: int) -> Candidate | None:
        """The candidate to start now; None while all workers are busy or when the search is over."""
        if in_flight and self._pool is not None and in_flight >= self._pool.size:
            return None
        left = self._seconds_left()
        if left is not None and left <= 0:
            self.progress.stopped_because = "the time budget is spent"
            return None
        if self.limits.max_trials is not None and self.progress.done + in_flight >= self.limits.max_trials:
            self.progress.stopped_because = "the trials are spent"
            return None
        if self.progress.failed >= HOPELESS_FAILURES and self.progress.best is None:
            self.progress.stopped_because = f"{self.progress.failed} trials have failed and none has fitted"
            return None
        candidate = self._adviser.best_candidate()
        if candidate is None:
            self.progress.stopped_because = "every config is measured or ruled out"
        elif candidate.expected_gain < WORTHWHILE_GAIN:
            self.progress.stopped_because = f"no untried config is expected to gain {WORTHWHILE_GAIN:.0%} or more"
            return None
        return candidate

    def _submit(self, config: Config, timing_seconds: float, rivals: tuple[Rival, ...] = ()) -> None:
        if self._pool is None:
            self._pool = self.open_pool()
        self._pool.submit(
            TrialRequest(
                job=self.job,
                config=config,
                memory_limit_bytes=self.limits.memory_bytes,
                deadline_seconds=self.limits.deadline_seconds,
                timing_seconds=timing_seconds,
                rivals=rivals,
            )
        )

    def _rivals(self, config: Config) -> tuple[Rival, ...]:
        """The measured configs of the same method: beaten by one of them, a trial need not be finished."""
        return tuple(
            Rival(device_bytes=p.measurement.device_bytes, tokens_per_second=p.measurement.tokens_per_second)
            for p in self.knowledge.points()
            if p.method == config["method"]
        )

    def _collect(self, in_flight: list[Config]) -> list[Trial]:
        """Wait for trials to end; each is committed before anything else happens to it."""
        assert self._pool is not None
        while True:
            completed = self._pool.wait(POLL_SECONDS)
            self._show(in_flight)
            if completed:
                break
        trials = []
        for done in completed:
            ended = self._trial(done.request.config, done.outcome, done.seconds)
            trial = self.save(self._losses.checked(ended))
            in_flight.remove(trial.config)
            self._count(trial)
            trials.append(trial)
        return trials

    def _trial(self, config: Config, outcome: Outcome, seconds: float) -> Trial:
        return Trial(
            config=config,
            workload=self.job.workload,
            hardware=self.job.hardware,
            stack=self.job.stack,
            memory_limit_bytes=self.limits.memory_bytes,
            outcome=outcome,
            seconds=seconds,
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _count(self, trial: Trial) -> None:
        self.progress.done += 1
        self._fits[trial.config] += isinstance(trial.outcome, Fits)
        if self.knowledge.does_not_fit(trial):
            self.progress.out_of_memory += 1
        elif not isinstance(trial.outcome, Fits):
            self.progress.failed += 1

    def _verify(self) -> bool:
        """Run the winner again in a fresh process, unless it was run twice; whether a trial was run."""
        winner = self.winner()
        if winner is None or self._fits[winner.config] >= 2 or self._verifications >= VERIFICATIONS:
            return False
        self._verifications += 1
        self.progress.verifying = True
        self._submit(winner.config, VERIFICATION_SECONDS)
        in_flight = [winner.config]
        for trial in self._collect(in_flight):
            self.progress.ruled_out += self._adviser.tell(trial)
        self.progress.verifying = False
        return True

    def winner(self) -> Point | None:
        """What would be recommended now."""
        return choose(self.knowledge.points(), memory_limit_bytes=self.limits.memory_bytes, methods=self.methods)

    def _seconds_left(self) -> float | None:
        if self.limits.seconds is None:
            return None
        return self.limits.seconds - (time.monotonic() - self._started)

    def _show(self, in_flight: list[Config] | None = None) -> None:
        self.progress.running = tuple(in_flight or ())
        self.progress.best = self.winner()
        self.progress.elapsed_seconds = time.monotonic() - self._started
        self.progress.left_seconds = self._seconds_left()
        self.report(self.progress)
