"""The search loop: ask, run, store, tell, until nothing untried can still win."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from autofit.catalog.models import shape
from autofit.errors import EnvironmentLacks
from autofit.frontier import Point, choose
from autofit.lattice import Config, Lattice
from autofit.outcome import Crashed, Fits, TimedOut, Trial
from autofit.search.advice import Advice
from autofit.search.adviser import Adviser
from autofit.search.budget import TIMING_SECONDS, VERIFICATION_SECONDS, Budget, Limits
from autofit.search.exactness import FamilyBaselines
from autofit.search.foresight import Foresight
from autofit.search.knowledge import Knowledge, answers
from autofit.techniques import Job, changes
from autofit.trial.request import Rival, TrialRequest
from autofit.units import format_bytes
from autofit.workers.pool import Completed, Pool
from autofit.workload import Goal

__all__ = ["Limits", "Progress", "Search"]

HOPELESS_FAILURES = 12
"""Crashes, time-outs and divergences without a single fit after which something must be broken that no config fixes."""
HOPELESS_DEADLINES = 3.0
"""Time lost to them after which the same holds, in multiples of one trial's deadline."""
MACHINERY_FAILURES = 3
"""Consecutive failures of the machinery after which it must be fixed before a trial can show anything."""
LEAST_DEADLINE_SECONDS = 90.0
"""No trial is taken to hang before this: start, set-up and an unlucky compilation may take that long."""
DEADLINE_SHARE = 0.2
"""Share of the time budget before which no trial is taken to hang: five hangs may use it up, one may not."""
DEADLINE_FACTOR = 5.0
"""Nor is a trial taken to hang before this multiple of its expected duration."""
POLL_SECONDS = 0.25


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a search stands, for display. Updated in place by the loop."""

    candidates: int
    """Valid configs of the lattice."""
    done: int = 0
    """Trials run by this search, including verification and those cut off at the end of its time."""
    out_of_memory: int = 0
    failed: int = 0
    """Trials that crashed, timed out or diverged."""
    ruled_out: int = 0
    """Configs that need not run, because a trial, the memory floor or their predicted memory excludes them."""
    from_store: int = 0
    """Configs answered by earlier trials."""
    estimated: tuple[int, int] | None = None
    """While configs are estimated before the first trial: how many are done, out of how many."""
    running: tuple[Config, ...] = ()
    best: Point | None = None
    """The best config so far, as the recommendation would choose it."""
    verifying: bool = False
    elapsed_seconds: float = 0.0
    left_seconds: float | None = None
    """What is left of the time budget; None without one."""
    stopped_because: str = ""
    regret_bound: float | None = None
    """When the search has ended: upper bound, with 95 % confidence, on how much slower the winner is than the best of
    its method, as a share of the best speed. None where nothing fits, and for an answer from the store, for which it is
    not computed."""


@dataclass(slots=True, kw_only=True)
class Search:
    """One search over a lattice. `run` may be called once; what it learns is kept in `knowledge` and in the store."""

    job: Job
    lattice: Lattice
    methods: tuple[str, ...]
    """The most faithful first."""
    limits: Limits
    floor: Callable[[Config], int]
    known: dict[Config, list[Trial]]
    """Earlier trials of this hardware, stack and workload that may make a new one unnecessary."""
    open_pool: Callable[[], Pool]
    """Called for the first trial that must be run: a search that the store answers starts no worker."""
    foresee: Callable[[Callable[[int, int], None]], Foresight] = lambda report: Foresight()
    """Called before the first trial that must be run, with a callback to report how many configs are predicted, out of
    how many."""
    save: Callable[[Trial], Trial]
    """Commits a trial, and returns it with its number."""
    report: Callable[[Progress], None] = lambda progress: None
    between: Callable[[], float] = lambda: 0.0
    """`repeatability.between_executions` of the hardware, as far as the saved trials show it."""
    goal: Goal = field(default_factory=Goal)
    """The user's: where speeds tie, the config that changes least relative to its plain recipe wins."""
    thorough: bool = False
    """Whether to go on for the frontier of every method once the best config is found, as long as the limits allow."""
    answer_only: bool = False
    """Whether to run nothing, because an identical search has already ended."""
    knowledge: Knowledge = field(init=False)
    progress: Progress = field(init=False)
    _adviser: Adviser = field(init=False)
    _foresight: Foresight | None = field(init=False, default=None)
    """None until a trial must be run."""
    _budget: Budget = field(init=False)
    _until_budget_ends: set[Config] = field(init=False, default_factory=set)
    """Configs under way whose trials will be killed because the search's time is over, before they count as hanging."""
    _baselines: FamilyBaselines = field(init=False)
    _pool: Pool | None = field(init=False, default=None)
    _is_checked: bool = field(init=False, default=False)
    """Whether the workers were found to have the hardware and stack that the job is for."""
    _retried: set[Config] = field(init=False, default_factory=set)
    """Configs whose trial was run again after a failure of the machinery."""
    _machinery_failures: int = field(init=False, default=0)
    """Consecutive ones."""
    _failed_seconds: float = field(init=False, default=0.0)

    def run(self) -> None:
        """Search until nothing untried can still win, or a limit is reached.

        Raises `EnvironmentLacks` if the workers' hardware or stack is not the job's, or if they fail repeatedly.
        """
        self._budget = Budget(limits=self.limits)
        self.knowledge = Knowledge(self.lattice, self.limits.memory_bytes)
        self.knowledge.executions_differ(self.between())
        self.progress = Progress(candidates=len(self.lattice.configs))
        dropout = self.job.workload.lora_dropout > 0 or shape(self.job.model).dropout
        self._baselines = FamilyBaselines(dropout=dropout)
        self._rule_out_by_floor()
        # For a whole frontier no method takes precedence.
        first = () if self.thorough else self.methods
        self._adviser = Adviser(self.knowledge, Advice(self.knowledge, self.floor, first, thorough=self.thorough))
        self._recall()
        if self.answer_only:
            self.progress.stopped_because = "the same search has already been completed"
            self._show()
            return
        try:
            self._explore()
            while self._verify():
                self._explore()  # the winner's second measurement may bring others back into play
            winner = self.winner()
            self.progress.regret_bound = None if winner is None else self._adviser.advice.regret_bound(winner)
            self._show()
        finally:
            if self._pool is not None:
                self._pool.close()

    def winner(self) -> Point | None:
        """What would be recommended now."""
        return choose(
            self.knowledge.points(),
            memory_limit_bytes=self.limits.memory_bytes,
            methods=self.methods,
            changes=lambda config: len(changes(config, self.goal)),
        )

    @property
    def beyond_host(self) -> Mapping[Config, int]:
        """The configs left out because host memory is predicted not to suffice, with the bytes that are missing."""
        return {} if self._foresight is None else self._foresight.beyond_host

    def _rule_out_by_floor(self) -> None:
        for config in self.lattice.configs:
            least = self.floor(config)
            if least > self.limits.memory_bytes:
                self.knowledge.rule_out(config, f"weights, gradients and states alone take {least} bytes")

    def _recall(self) -> None:
        """Tell the adviser what the store knows."""
        stored = answers(self.known, self.lattice, self.limits.memory_bytes, self.limits.deadline_seconds)
        for config, trial in stored.items():
            checked = self._checked(trial)
            self._adviser.recall(checked if checked is trial else self.save(checked), self.known[config])
        self.progress.from_store = len(stored)
        self._refute()
        self._show()

    def _explore(self) -> None:
        in_flight: list[Config] = []
        while True:
            while self._may_begin(in_flight):
                config = self._adviser.ask(self._seconds_to_explore())
                in_flight.append(config)
                self._submit(config, TIMING_SECONDS, self._rivals(config))
            if not in_flight:
                return
            for trial in self._collect(in_flight):
                self._adviser.tell(trial)
            self._refute()
            self._show(in_flight)

    def _may_begin(self, in_flight: list[Config]) -> bool:
        """Whether to start another trial now; if there is a reason to stop, notes it in `progress`."""
        if in_flight and self._pool is not None and len(in_flight) >= self._pool.size:
            return False
        reason = self._reason_to_stop(len(in_flight))
        if reason is None and self._foresee():
            reason = self._reason_to_stop(len(in_flight))
        if reason is not None:
            self.progress.stopped_because = reason
        return reason is None and self._host_holds_next(in_flight)

    def _host_holds_next(self, in_flight: list[Config]) -> bool:
        """Whether host memory is predicted to hold the next trial alongside those under way; else it waits for them."""
        if not in_flight or self._foresight is None:
            return True
        following = self._adviser.best_candidate(self._seconds_to_explore())
        return following is None or self._foresight.held_beside(following.config, in_flight)

    def _foresee(self) -> bool:
        """Take the predictions into account; False if that was already done."""
        if self._foresight is not None:
            return False
        self._start()  # workers load their libraries meanwhile
        self._foresight = self.foresee(self._estimated)
        self.progress.estimated = None
        for config, lacking in self._foresight.beyond_host.items():
            self.knowledge.rule_out(config, f"host memory is predicted to lack {format_bytes(lacking)}")
        self._adviser.advice.foresee(self._foresight)
        self._show()
        return True

    def _estimated(self, done: int, total: int) -> None:
        self.progress.estimated = (done, total)
        self._show()

    def _reason_to_stop(self, in_flight: int) -> str | None:
        seconds = self._seconds_to_explore()
        if seconds is not None and seconds <= 0:
            return "the time budget is spent"
        if self._budget.trials_left(self.progress.done + in_flight) <= self._must_verify():
            return "the trial limit is reached"
        hopeless_seconds = HOPELESS_DEADLINES * self.limits.deadline_seconds
        if self.progress.best is None and (
            self.progress.failed >= HOPELESS_FAILURES or self._failed_seconds >= hopeless_seconds
        ):
            return f"{self.progress.failed} trials failed and none fitted"
        if self._adviser.best_candidate(seconds) is not None:
            return None
        predicted_out = len(self._adviser.advice.predicted_out())
        if len(self.knowledge.open) == predicted_out:
            also = ", or predicted not to fit" if predicted_out else ""
            return f"every config is measured or ruled out{also}"
        if self._adviser.best_candidate() is not None:
            return "no untried config is expected to finish its trial in the time left"
        gain = self._adviser.advice.worthwhile_gain()
        return f"no untried config that is likely to fit is expected to gain {gain:.1%} or more"

    def _must_verify(self) -> bool:
        winner = self.winner()
        return winner is not None and not winner.verified

    def _seconds_to_explore(self) -> float | None:
        """What is left of the time budget after setting aside the winner's verification; None without a budget."""
        left = self._budget.seconds_left
        return None if left is None else left - self._verification_seconds()

    def _verification_seconds(self) -> float:
        """Roughly how long the winner's verification will take, judging by its first trial; 0 where it needs none."""
        winner = self.winner()
        if winner is None or not self._must_verify():
            return 0.0
        return self.knowledge.trials[winner.config].seconds + max(0.0, self._verification_timing() - TIMING_SECONDS)

    def _verification_timing(self) -> float:
        """Seconds of timed repeats: the winner's last digit is worth no more than a tenth of a time budget."""
        total = self.limits.seconds
        return VERIFICATION_SECONDS if total is None else min(VERIFICATION_SECONDS, max(TIMING_SECONDS, total / 10))

    def _submit(self, config: Config, timing_seconds: float, rivals: tuple[Rival, ...] = ()) -> None:
        pool = self._checked_pool()
        own = self._own_deadline(config)
        left = self._budget.left_for_trial(0.0 if self.progress.verifying else self._verification_seconds())
        self._until_budget_ends.discard(config)
        if left < own:
            self._until_budget_ends.add(config)
        pool.submit(
            TrialRequest(
                job=self.job,
                config=config,
                memory_limit_bytes=self.limits.memory_bytes,
                deadline_seconds=min(own, left),
                timing_seconds=timing_seconds,
                rivals=rivals,
            )
        )

    def _own_deadline(self, config: Config) -> float:
        """Seconds after which a trial of `config` is taken to hang: with a time budget, soon enough for others to run.

        The winner's second run has the usual deadline: its failure counts for everyone who asks the store.
        """
        if self.limits.seconds is None or self.progress.verifying:
            return self.limits.deadline_seconds
        expected = self._adviser.expected_seconds(config)
        patience = max(LEAST_DEADLINE_SECONDS, DEADLINE_SHARE * self.limits.seconds, DEADLINE_FACTOR * expected)
        return min(self.limits.deadline_seconds, patience)

    def _start(self) -> Pool:
        """The workers, which may not be up yet."""
        if self._pool is None:
            self._pool = self.open_pool()
        return self._pool

    def _checked_pool(self) -> Pool:
        """The workers; raises `EnvironmentLacks` if their trials would be stored under another device or stack."""
        pool = self._start()
        if self._is_checked:
            return pool
        hardware, stack = pool.site()
        if hardware.key != self.job.hardware.key:
            raise EnvironmentLacks(
                f"the workers have {hardware.name}, the search is for {self.job.hardware.name}",
                remedy="use --workers 1, or let CUDA_VISIBLE_DEVICES name devices of one kind",
            )
        if stack.key != self.job.stack.key:
            raise EnvironmentLacks(
                f"the workers' library versions differ from this process's: {stack} and {self.job.stack}",
                remedy="use one environment for both",
            )
        self._is_checked = True
        return pool

    def _rivals(self, config: Config) -> tuple[Rival, ...]:
        """The measured configs of the same method: a trial that one of them beats need not be finished."""
        return tuple(
            Rival(device_bytes=p.measurement.device_bytes, tokens_per_second=p.measurement.tokens_per_second)
            for p in self.knowledge.points()
            if p.method == config["method"]
        )

    def _collect(self, in_flight: list[Config]) -> list[Trial]:
        """Wait for trials to end; each is committed before anything else happens to it. Those cut off by the budget,
        and those run again after a failure of the machinery, are not returned."""
        assert self._pool is not None
        while not (completed := self._pool.wait(POLL_SECONDS)):
            self._show(in_flight)
        trials = []
        for done in completed:
            in_flight.remove(done.request.config)
            trial = self.save(self._checked(self._trial(done)))
            self._count(trial)
            if self._cut_by_budget(trial):
                self._adviser.give_up(trial.config)
            else:
                trials.append(trial)
        self._show(in_flight)
        return [trial for trial in trials if not self._begun_again(trial, in_flight)]

    def _cut_by_budget(self, trial: Trial) -> bool:
        """Whether the trial was killed because the search's time is over: that says nothing about its config."""
        return isinstance(trial.outcome, TimedOut) and trial.config in self._until_budget_ends

    def _begun_again(self, trial: Trial, in_flight: list[Config]) -> bool:
        """Retry a trial once if the machinery failed; returns whether it is retried. Raises `EnvironmentLacks` after
        `MACHINERY_FAILURES` in a row."""
        if not (isinstance(trial.outcome, Crashed) and trial.outcome.transient):
            self._machinery_failures = 0
            return False
        self._machinery_failures += 1
        if self._machinery_failures >= MACHINERY_FAILURES:
            raise EnvironmentLacks(
                f"{self._machinery_failures} trials in a row have failed through no fault of their configs, the last: "
                f"{trial.outcome.reason}",
                remedy="fix that, and run the same command: it resumes from here; `autofit doctor` may say more",
            )
        left = self._budget.seconds_left
        spent = self._budget.trials_left(self.progress.done + len(in_flight)) <= 0 or (left is not None and left <= 0)
        if spent or trial.config in self._retried:
            return False
        self._retried.add(trial.config)
        if self.progress.verifying:
            self._submit(trial.config, self._verification_timing())
        else:
            self._submit(trial.config, TIMING_SECONDS, self._rivals(trial.config))
        in_flight.append(trial.config)
        return True

    def _trial(self, done: Completed) -> Trial:
        return Trial(
            config=done.request.config,
            workload=self.job.workload,
            hardware=self.job.hardware,
            stack=self.job.stack,
            memory_limit_bytes=self.limits.memory_bytes,
            outcome=done.outcome,
            seconds=done.seconds,
            recorded_at=_now(),
            prediction=self._foresight.predictions.get(done.request.config) if self._foresight is not None else None,
        )

    def _checked(self, trial: Trial) -> Trial:
        """`trial`, as `Diverged` if a plainer config of its family trains differently."""
        checked = self._baselines.checked(trial)
        return checked if checked is trial else self._verdict(checked)

    def _verdict(self, refuted: Trial) -> Trial:
        """A trial that this search has found to be wrong, with this search's limit and the current time."""
        return replace(refuted, memory_limit_bytes=self.limits.memory_bytes, recorded_at=_now())

    def _refute(self) -> None:
        """Store and tell the trials that later, plainer ones have shown to be wrong."""
        for refuted in self._baselines.take_refuted():
            self._adviser.tell(self.save(self._verdict(refuted)))

    def _count(self, trial: Trial) -> None:
        self.progress.done += 1
        if self.knowledge.does_not_fit(trial):
            self.progress.out_of_memory += 1
        elif not isinstance(trial.outcome, Fits):
            self.progress.failed += 1
            self._failed_seconds += trial.seconds

    def _verify(self) -> bool:
        """Run the winner again in a fresh process, unless it has run twice; returns whether that has shown anything."""
        winner = self.winner()
        if winner is None or not self._must_verify() or self._budget.trials_left(self.progress.done) < 1:
            return False
        self._foresee()  # takes time, so it comes before asking how much is left
        if self._budget.left_for_trial() < self._verification_seconds():
            return False
        self.progress.verifying, shown = True, False
        in_flight = [winner.config]
        self._submit(winner.config, self._verification_timing())
        while in_flight:
            for trial in self._collect(in_flight):
                shown = True
                if not (isinstance(trial.outcome, Crashed) and trial.outcome.transient):
                    self._adviser.tell(trial)
        self._refute()
        self.knowledge.executions_differ(self.between())  # the second run shows more of it
        self.progress.verifying = False
        return shown

    def _show(self, in_flight: list[Config] | None = None) -> None:
        self.progress.running = tuple(in_flight or ())
        self.progress.ruled_out = len(self.knowledge.ruled_out) + len(self._adviser.advice.predicted_out())
        self.progress.best = self.winner()
        self.progress.elapsed_seconds = self._budget.elapsed_seconds
        self.progress.left_seconds = self._budget.seconds_left
        self.report(self.progress)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
