"""The search loop: ask, run, store, tell, until nothing untried can still win."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autofit.catalog.models import shape
from autofit.core.frontier import Point, choose, least_practical_speed
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Trial, machinery_failed, now, worker_was_lost
from autofit.core.units import counted, format_bytes
from autofit.planning.plan import Plan
from autofit.prediction.predictions import Predictions, Predictor
from autofit.search.acquisition.acquisition import LARGE_GAIN, Acquisition, Candidate
from autofit.search.acquisition.adviser import Adviser
from autofit.search.budget import TIMING_SECONDS, VERIFICATION_SECONDS, Budget, wall_clock
from autofit.search.correctness import FamilyBaselines
from autofit.search.failures import MOST_LOST_WORKERS
from autofit.search.lattice_state import LatticeState, answers
from autofit.search.progress import Progress
from autofit.search.scheduler import Scheduler
from autofit.store.trial_log import TrialLog
from autofit.techniques import changes
from autofit.trial.request import Rival, TrialRequest
from autofit.workers.pool import Pool

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class SearchLoop:
    """One search over a lattice: `run` or `answer` may be called once. What it learns is in `state` and in the log."""

    plan: Plan
    predictor: Predictor
    """Asked before the first trial that must be run."""
    log: TrialLog
    open_pool: Callable[[], Pool]
    """Called for the first trial that must be run: a search that the log answers starts no worker."""
    report: Callable[[Progress], None] = lambda progress: None
    clock: Callable[[], float] = wall_clock
    """The clock of the time budget: seconds since some moment."""
    state: LatticeState = field(init=False)
    progress: Progress = field(init=False)
    _acquisition: Acquisition = field(init=False)
    _adviser: Adviser = field(init=False)
    _predictions: Predictions | None = field(init=False, default=None)
    """None until a trial must be run."""
    _budget: Budget = field(init=False)
    _scheduler: Scheduler = field(init=False)
    _baselines: FamilyBaselines = field(init=False)
    _failed_seconds: list[float] = field(init=False, default_factory=list)
    """What each trial took that has failed without a result, through a fault of its config."""

    def run(self) -> None:
        """Search until nothing untried can still win, or a limit is reached.

        Raises `EnvironmentLacks` if the workers' hardware or stack is not the job's, or if they fail repeatedly.
        """
        self._recall()
        try:
            self._explore()
            while self._verify() or self._contest():
                self._explore()  # a second measurement may bring others back into play
            winner = self.winner()
            self.progress.regret_bound = None if winner is None else self._acquisition.belief.regret_bound(winner)
            self.show()
        finally:
            self._scheduler.close()

    def answer(self) -> None:
        """Answer from earlier trials alone, because the same search has already ended."""
        self._recall()
        self.progress.stopped_because = "the same search has already ended"
        self.show()

    def winner(self) -> Point | None:
        """The point that would be recommended now."""
        return choose(
            self.state.points(),
            memory_limit_bytes=self.plan.limits.memory_bytes,
            methods=self.plan.goal.methods,
            changes=lambda config: len(changes(config, self.plan.goal)),
        )

    def quickest(self) -> Candidate | None:
        """The open config that is worth a trial and whose trial should end first; None if there is none."""
        return min(self._acquisition.worthwhile(), key=lambda c: c.expected_seconds, default=None)

    @property
    def kept_waiting(self) -> str | None:
        """Why a trial was not even begun, if one was not: another process held the device."""
        return self._scheduler.kept_waiting

    @property
    def beyond_host(self) -> Mapping[Config, int]:
        """The configs left out because host memory is predicted not to suffice, with the bytes that are missing."""
        return {} if self._predictions is None else self._predictions.beyond_host

    def _begin(self) -> None:
        job, limits = self.plan.job, self.plan.limits
        self._budget = Budget(limits=limits, clock=self.clock)
        self.state = LatticeState.of(self.plan)
        self.progress = Progress(candidates=len(self.plan.lattice.configs))
        dropout = job.workload.lora_dropout > 0 or shape(job.model).dropout
        # A user's program chooses its own data and initial weights.
        comparable = job.workload.program is None and not dropout and not job.hardware.is_emulated
        self._baselines = FamilyBaselines(comparable=comparable)
        self._scheduler = Scheduler(budget=self._budget, open_pool=self.open_pool, sink=self)
        self._acquisition = Acquisition(self.plan, self.state)
        self._adviser = Adviser(self.state, self._acquisition)

    def _recall(self) -> None:
        self._begin()
        trials_by_config, limits = self.log.attempts(self.plan.job), self.plan.limits
        self._note_repeatability()
        self.state.recall_bounds(trial for attempts in trials_by_config.values() for trial in attempts)
        stored = answers(trials_by_config, self.plan.lattice, limits.memory_bytes, limits.deadline_seconds)
        for config, trial in stored.items():
            checked = self._checked(trial)
            self._adviser.recall(checked if checked is trial else self.log.keep(checked), trials_by_config[config])
        self.progress.from_store = len(stored)
        self._rule_out_lost_workers(trial for attempts in trials_by_config.values() for trial in attempts)
        self._refute()
        self.show()

    def _rule_out_lost_workers(self, trials: Iterable[Trial]) -> None:
        """Rule out configs whose trials have lost too many workers: they would cost every search as many again."""
        self._scheduler.lost_workers = Counter(trial.config for trial in trials if worker_was_lost(trial.outcome))
        lost, reason = self._scheduler.lost_workers, f"{MOST_LOST_WORKERS} workers were lost while it ran"
        left_out = self.state.rule_out({c: reason for c, times in lost.items() if times >= MOST_LOST_WORKERS})
        if left_out:
            _log.warning(
                "autofit: configs left out because %d workers were lost while each of them ran: %s (--fresh tries "
                "them again)",
                MOST_LOST_WORKERS,
                "; ".join(map(str, left_out)),
            )

    def _explore(self) -> None:
        while True:
            while self._may_begin():
                config = self._adviser.ask(self._seconds_to_explore())
                expected = self._acquisition.belief.expected_seconds(config)
                by_user = self.plan.job.workload.program is not None
                request = TrialRequest(
                    job=self.plan.job,
                    config=config,
                    memory_limit_bytes=self.plan.limits.memory_bytes,
                    deadline_seconds=self._budget.patience_seconds(expected),
                    # Nothing tells how long a user's program takes before its first step.
                    allowance_seconds=None if by_user else self._budget.allowance_seconds(expected),
                    timing_seconds=TIMING_SECONDS,
                    rivals=self._rivals(config),
                    least_tokens_per_second=self._practical_speed(config),
                )
                self._scheduler.begin(request, reserved_seconds=self._verification_seconds())
            if not self._scheduler.in_flight:
                return
            trials, cut_off = self._scheduler.collect()
            for config in cut_off:
                self._adviser.give_up(config)
            for trial in trials:
                self._adviser.tell(trial)
            self._refute()
            self.show()

    def _may_begin(self) -> bool:
        """Whether to start another trial now; if there is a reason to stop, notes it in `progress`."""
        if self._scheduler.busy:
            return False
        reason = self._reason_to_stop()
        if reason is None and self._predict_once():
            reason = self._reason_to_stop()
        if reason is not None:
            self.progress.stopped_because = reason
        return reason is None and self._host_holds_next()

    def _host_holds_next(self) -> bool:
        """Whether host memory is predicted to hold the next trial alongside those under way; else it waits for them."""
        in_flight = self._scheduler.in_flight
        if not in_flight or self._predictions is None:
            return True
        candidate = self._acquisition.best(self._seconds_to_explore())
        return candidate is None or self._predictions.held_beside(candidate.config, in_flight)

    def _predict_once(self) -> bool:
        """Take the predictions into account; False if that was already done."""
        if self._predictions is not None:
            return False
        self._scheduler.start()  # workers load their libraries meanwhile
        self._predictions = self.predictor.predict(self._estimated)
        self._scheduler.predictions = self._predictions.by_config
        self.progress.estimated = None
        beyond_host = self._predictions.beyond_host.items()
        self.state.rule_out({c: f"host memory is predicted to lack {format_bytes(lack)}" for c, lack in beyond_host})
        self._acquisition.use(self._predictions)
        self.show()
        return True

    def _estimated(self, done: int, total: int) -> None:
        self.progress.estimated = (done, total)
        self.show()

    def _reason_to_stop(self) -> str | None:
        seconds = self._seconds_to_explore()
        if seconds is not None and seconds <= 0:
            return f"the time budget is spent{self._untried('a longer --time-budget')}"
        reserved_trials = 0 if self._unverified_winner() is None else 1
        if self._budget.trials_left(self._scheduler.ended + len(self._scheduler.in_flight)) <= reserved_trials:
            return f"the trial limit is reached{self._untried('a larger --max-trials')}"
        # A dozen crashes, time-outs and divergences without a single fit, or three deadlines lost to them: something
        # must be broken that no config fixes.
        failed = len(self._failed_seconds)
        is_broken = failed >= 12 or sum(self._failed_seconds) >= 3.0 * self.plan.limits.deadline_seconds
        if self.progress.best is None and is_broken:
            return f"{failed} trials failed and none fitted"
        if self._acquisition.best(seconds) is not None:
            return None
        predicted_out = len(self._acquisition.predicted_out())
        if len(self.state.open) == predicted_out:
            addition = ", or predicted not to fit" if predicted_out else ""
            return f"every config is measured or ruled out{addition}"
        if self._acquisition.best() is not None:
            return f"no trial is expected to end in the time left{self._untried('a longer --time-budget')}"
        gain = self._acquisition.worthwhile_gain()
        return (
            f"no untried config is worth its trial: it would have to promise {gain:.1%} more speed, or "
            f"{LARGE_GAIN:.0%} where it may not fit"
        )

    def _untried(self, larger_limit: str) -> str:
        """How many configs a search with a `larger_limit` has before it; empty if none of them is worth its trial."""
        if self._acquisition.best() is None:
            return ""
        untried = len(self.state.open) - len(self._acquisition.predicted_out())
        return f", with {counted(untried, 'config')} untried (give {larger_limit})"

    def _unverified_winner(self) -> Point | None:
        """The winner, if it has run only once."""
        winner = self.winner()
        return None if winner is None or winner.verified else winner

    def _seconds_to_explore(self) -> float | None:
        """Seconds left of the time budget after setting aside the winner's verification; None without a budget."""
        left = self._budget.seconds_left
        return None if left is None else left - self._verification_seconds()

    def _verification_seconds(self) -> float:
        """Roughly how long the winner's verification will take, judging by its first trial; 0 where it needs none."""
        winner = self._unverified_winner()
        return 0.0 if winner is None else self._seconds_to_run_again(winner, self._verification_timing())

    def _seconds_to_run_again(self, measured: Point, timing_seconds: float) -> float:
        """Roughly how long a second run of a config will take, judging by its first."""
        return self.state.trials[measured.config].seconds + timing_seconds - TIMING_SECONDS

    def _verification_timing(self) -> float:
        """Seconds of timed repeats of the winner: no more than a tenth of a time budget, but at least as long as any
        other trial's."""
        total = self.plan.limits.seconds
        return VERIFICATION_SECONDS if total is None else min(VERIFICATION_SECONDS, max(TIMING_SECONDS, total / 10))

    def _rivals(self, config: Config) -> tuple[Rival, ...]:
        """The measured configs of the same method: a trial that one of them beats need not be finished."""
        return tuple(
            Rival(device_bytes=p.measurement.device_bytes, tokens_per_second=p.measurement.tokens_per_second)
            for p in self.state.points()
            if p.method == config["method"]
        )

    def _practical_speed(self, config: Config) -> float:
        """Tokens per second without which the method of `config` is not practical (`least_practical_speed`); 0 where
        the frontier of every method is wanted."""
        method, methods = config.text("method"), self.plan.goal.methods
        if self.plan.thorough or method not in methods:
            return 0.0
        fastest = self.state.fastest(methods)
        return least_practical_speed(method, {name: p.measurement.tokens_per_second for name, p in fastest.items()})

    def keep(self, trial: Trial) -> Trial:
        """Check and commit a trial of this search, and count it."""
        kept = self.log.keep(self._checked(trial))
        if self.state.does_not_fit(kept):
            self.progress.out_of_memory += 1
        elif worker_was_lost(kept.outcome):
            pass  # a lost node loses all of its trials, which says little about each
        # A trial that went on for a whole deadline may hang within a micro-step, as if that were slow.
        elif not isinstance(kept.outcome, Fits) and (
            kept.least_step_seconds is None or kept.seconds >= self.plan.limits.deadline_seconds
        ):
            self.progress.failed += 1
            if not machinery_failed(kept.outcome):
                self._failed_seconds.append(kept.seconds)
        return kept

    def set_aside(self, trial: Trial, reason: str) -> None:
        """Stop counting a kept trial: its device is not what its name says."""
        self.log.set_aside(trial, reason)
        self.state.set_aside(trial, reason)

    def _checked(self, trial: Trial) -> Trial:
        """`trial`, as `Diverged` if a plainer config of its family trains differently."""
        checked = self._baselines.checked(trial)
        return checked if checked is trial else self._of_this_search(checked)

    def _of_this_search(self, refuted: Trial) -> Trial:
        return replace(refuted, memory_limit_bytes=self.plan.limits.memory_bytes, recorded_at=now())

    def _refute(self) -> None:
        """Store the trials that later, plainer ones have shown to be wrong, and tell the adviser."""
        for refuted in self._baselines.take_refuted():
            self._adviser.tell(self.log.keep(self._of_this_search(refuted)))

    def _verify(self) -> bool:
        """Run the winner again in a fresh process, unless it has run twice; returns whether that gave a result."""
        winner = self._unverified_winner()
        return winner is not None and self._run_again(winner, self._verification_timing())

    def _contest(self) -> bool:
        """Run again a config that may well be faster than the winner, despite its one noisy trial; returns whether that
        gave a result."""
        winner = self.winner()
        if winner is None or self._budget.is_spent(self._scheduler.ended):
            return False
        rival = self._acquisition.contender(winner)
        return rival is not None and self._run_again(rival, TIMING_SECONDS)

    def _run_again(self, measured: Point, timing_seconds: float) -> bool:
        """Run a fitting config again in a fresh process, if the limits allow; returns whether that gave a result.

        Its gradient is compared with plain training's, because it may be what is recommended.
        """
        if self._budget.trials_left(self._scheduler.ended) < 1:
            return False
        self._predict_once()  # takes time, so it comes before asking how much is left
        if self._budget.left_for_trial() < self._seconds_to_run_again(measured, timing_seconds):
            return False
        self.progress.verifying, has_result = True, False
        request = TrialRequest(
            job=self.plan.job,
            config=measured.config,
            memory_limit_bytes=self.plan.limits.memory_bytes,
            # More patient than for the others: the winner's failure would count for everyone who asks the store.
            deadline_seconds=self.plan.limits.deadline_seconds,
            timing_seconds=timing_seconds,
            compares_gradient=True,
        )
        self._scheduler.begin(request)
        while self._scheduler.in_flight:
            trials, _ = self._scheduler.collect()
            has_result = has_result or bool(trials)
            for trial in trials:
                if not machinery_failed(trial.outcome):
                    self._adviser.tell(trial)
            self._refute()
            self._note_repeatability()  # the second run tells more about it
            self.show()
        self.progress.verifying = False
        return has_result

    def _note_repeatability(self) -> None:
        self.state.executions_differ(self.log.between_executions(self.plan.job.hardware))

    def show(self) -> None:
        self.log.check()  # only after every trial of a batch is kept, so that no other worker's is lost
        self.progress.done = self._scheduler.ended
        self.progress.running = self._scheduler.in_flight
        self.progress.slow_nodes = self._scheduler.slow
        self.progress.ruled_out = len(self.state.ruled_out) + len(self._acquisition.predicted_out())
        self.progress.best = self.winner()
        self.progress.elapsed_seconds = self._budget.elapsed_seconds
        self.progress.left_seconds = self._budget.seconds_left
        self.report(self.progress)
