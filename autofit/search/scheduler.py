"""The trials under way: begun on the workers, committed as they end, run again where the machinery failed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autofit.core.errors import EnvironmentLacks
from autofit.core.lattice import Config
from autofit.core.outcome import Crashed, Fits, TimedOut, Trial, machinery_failed
from autofit.core.prediction import Prediction
from autofit.search.budget import Budget
from autofit.search.failures import MOST_LOST_WORKERS, FailuresInARow
from autofit.techniques import Job
from autofit.trial.machine.device_lock import NOT_BEGUN
from autofit.trial.process.classify import DEVICE_GONE, NO_KERNELS
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Pool

if TYPE_CHECKING:
    from autofit.search.loop import SearchLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """A trial under way."""

    request: TrialRequest
    """With the deadline after which the trial is taken to hang."""
    reserved_seconds: float
    """What of the search's time the trial must leave for later."""
    number: int = 0
    """How many trials had been begun then, this one included."""


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Runs a search's trials, as many at once as there are workers."""

    budget: Budget
    open_pool: Callable[[], Pool]
    """Called for the first trial."""
    sink: SearchLoop
    """The search, which judges and commits each trial before anything else happens to it."""
    predictions: Mapping[Config, Prediction] = field(default_factory=dict)
    """Stored beside the trials' measurements."""
    ended: int = 0
    """How many trials have ended."""
    lost_workers: Counter[Config] = field(default_factory=Counter)
    """How many workers were lost while each config ran, in earlier searches and in this one."""
    _pool: Pool | None = field(init=False, default=None)
    _is_checked: bool = field(init=False, default=False)
    """Whether the workers were found to have the hardware and stack that the job is for."""
    _in_flight: dict[Config, _InFlight] = field(init=False, default_factory=dict)
    _kept_by_worker: defaultdict[str, list[Trial]] = field(init=False, default_factory=lambda: defaultdict(list))
    """The trials that each worker has run, as they were kept."""
    _retried: set[Config] = field(init=False, default_factory=set)
    """Configs whose trial was run again after a failure of the machinery."""
    _workers_cost: Counter[Config] = field(init=False, default_factory=Counter)
    """How many workers were left out because each config failed there."""
    _failures: FailuresInARow = field(init=False, default_factory=FailuresInARow)
    _doubtful_runs: Counter[Config] = field(init=False, default_factory=Counter)
    """How often each config's trial was run again in a row because its time was in doubt."""
    _always_busy: bool = field(init=False, default=False)
    """Whether the last repeats found the device busy every time: until a trial does not, none is repeated for it."""
    kept_waiting: str | None = field(init=False, default=None)
    """Why the last trial that could not be begun was not: another process had the device."""

    @property
    def in_flight(self) -> tuple[Config, ...]:
        """The configs whose trials are under way, in the order in which they were begun."""
        return tuple(self._in_flight)

    @property
    def busy(self) -> bool:
        return self._pool is not None and 0 < len(self._in_flight) >= self._pool.size

    @property
    def slow(self) -> tuple[str, ...]:
        """A sentence for each worker whose trials are set aside."""
        return () if self._pool is None else tuple(self._pool.set_aside.values())

    def start(self) -> Pool:
        """The workers, which may not be up yet."""
        if self._pool is None:
            self._pool = self.open_pool()
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def begin(self, request: TrialRequest, *, reserved_seconds: float = 0.0) -> None:
        """Start a trial on an idle worker. It is killed before its deadline where the search's time, less
        `reserved_seconds`, is over by then. Raises `EnvironmentLacks` if its result would be stored under another
        device or stack than it is for."""
        self._submit(_InFlight(request=request, reserved_seconds=reserved_seconds))

    def collect(self) -> tuple[list[Trial], list[Config]]:
        """Wait for trials to end: those that have shown something, and the configs whose trials were cut off because
        the search's time is over, which says nothing about them. Trials that are run again are in neither; of those
        whose time is in doubt every time, the last is believed. Earlier ones may have been set aside meanwhile.

        Both are empty where a worker comes up meanwhile, which need not wait for the others' trials. All are committed.
        Raises `EnvironmentLacks` where the machinery fails again and again (`FailuresInARow`), and not only on some of
        the workers.
        """
        assert self._pool is not None
        workers = self._pool.size
        while not (completed := self._pool.wait(0.25)) and self._pool.size <= workers:
            self.sink.show()
        ended, cut = [], []
        for request, attempt in completed:
            in_flight = self._in_flight.pop(request.config)
            if NOT_BEGUN in (reason := getattr(attempt.outcome, "reason", "")):
                self.kept_waiting = reason
                cut.append(request.config)
                continue
            trial = request.trial(attempt, self.predictions.get(request.config))
            if (reason := self._pool.set_aside.get(attempt.worker)) is not None:
                trial = trial.set_aside(reason)
            trial = self.sink.keep(trial)
            self._kept_by_worker[attempt.worker].append(trial)
            self.ended += 1
            run_request = request.after_waiting(attempt.waited_seconds)
            patience = in_flight.request.deadline_seconds
            if run_request.deadline_seconds < patience and _killed_at(trial, run_request.deadline_seconds):
                cut.append(trial.config)
            else:
                ended.append((in_flight, trial, attempt.worker))
        final = [trial for in_flight, trial, worker in ended if not self._repeats(in_flight, trial, worker)]
        self._set_aside_earlier()
        return final, cut

    def _set_aside_earlier(self) -> None:
        """Set aside what ran on workers before they were found to be slow."""
        assert self._pool is not None
        for worker, reason in self._pool.set_aside.items():
            for trial in self._kept_by_worker.pop(worker, ()):
                if not trial.why_set_aside and trial.set_aside(reason).why_set_aside:
                    self.sink.set_aside(trial, reason)

    def _submit(self, in_flight: _InFlight) -> None:
        pool = self._checked_pool(in_flight.request.job)
        left = self.budget.left_for_trial(in_flight.reserved_seconds)
        deadline = min(in_flight.request.deadline_seconds, left)
        pool.submit(replace(in_flight.request, deadline_seconds=deadline, wait_seconds=left))
        self._in_flight[in_flight.request.config] = replace(in_flight, number=self._failures.begin())

    def _checked_pool(self, job: Job) -> Pool:
        """The workers; raises `EnvironmentLacks` if their trials would be stored under another device or stack."""
        pool = self.start()
        if self._is_checked:
            return pool
        hardware, stack = pool.site()
        if hardware.key != job.hardware.key:
            raise EnvironmentLacks(
                f"the workers have {hardware.name}, the search is for {job.hardware.name}",
                remedy="use --workers 1, or let CUDA_VISIBLE_DEVICES name devices of one kind",
            )
        if stack.key != job.stack.key:
            raise EnvironmentLacks(
                f"the workers' library versions differ from this process's: {stack} and {job.stack}",
                remedy="use one environment for both",
            )
        self._is_checked = True
        return pool

    def _repeats(self, in_flight: _InFlight, trial: Trial, worker: str) -> bool:
        """Run a trial again if its machinery failed or its time is in doubt, as long as the limits allow; returns
        whether it is run again. Raises `EnvironmentLacks` where no further trial can succeed."""
        if machinery_failed(trial.outcome):
            is_due = self._leaves_out(worker, trial.config, trial.outcome) or self._is_due_after_failure(
                in_flight, trial.config, trial.outcome
            )
        else:
            self._failures.passed()
            is_due = self._is_due_in_doubt(trial)
        if not is_due or self.budget.is_spent(self.ended + len(self._in_flight)):
            return False
        self._submit(in_flight)
        return True

    def _leaves_out(self, worker: str, config: Config, outcome: Crashed) -> bool:
        """Whether the worker gets no more trials: its device is gone, or its machinery has failed twice in a row, and
        others go on. What has failed there counts against no config, and not as a failure of them all. But a config
        that has cost two workers may be the cause itself: it costs no third."""
        assert self._pool is not None
        is_bad = DEVICE_GONE in outcome.reason or self._has_failed_again(worker)
        if outcome.worker_lost or not is_bad or self._workers_cost[config] == 2:
            return False
        if not self._pool.leave_out(worker, outcome.reason):
            return False
        self._workers_cost[config] += 1
        self._failures.passed()
        self._retried.difference_update(trial.config for trial in self._kept_by_worker[worker])
        return True

    def _has_failed_again(self, worker: str) -> bool:
        last = self._kept_by_worker[worker][-2:]
        return len(last) == 2 and all(machinery_failed(trial.outcome) for trial in last)

    def _is_due_after_failure(self, in_flight: _InFlight, config: Config, outcome: Crashed) -> bool:
        """Whether to run a trial again whose machinery failed: once, or more often if its worker was lost
        (`MOST_LOST_WORKERS`). Raises `EnvironmentLacks` where the machinery fails again and again, and at once where
        the device is gone or torch was not built for it."""
        if DEVICE_GONE in outcome.reason:
            raise EnvironmentLacks(
                f"{outcome.reason}; everything measured is kept",
                remedy="check nvidia-smi, and dmesg for Xid errors; once the device is back (it may take a reset or a "
                "reboot), run the same command: it resumes from here",
            )
        if NO_KERNELS in outcome.reason:
            raise EnvironmentLacks(
                outcome.reason, remedy="choose a torch build (docs/install.md), then run the same command"
            )
        self._failures.failed(in_flight.number, outcome)
        if outcome.worker_lost:
            self.lost_workers[config] += 1
            return self.lost_workers[config] < MOST_LOST_WORKERS
        is_first = config not in self._retried
        self._retried.add(config)
        return is_first

    def _is_due_in_doubt(self, trial: Trial) -> bool:
        """Whether to run a trial again because its worker's trials are set aside (the worker gets no other) or, twice
        at most, because others were busy on its device or that was throttled: each run may find it free, and some
        machines always are busy."""
        if trial.why_set_aside:
            return True
        if not trial.doubts:
            self._doubtful_runs.pop(trial.config, None)
            # Crashes and the like say nothing of how busy the device is.
            self._always_busy = self._always_busy and not isinstance(trial.outcome, Fits)
            return False
        if not self._always_busy:
            self._doubtful_runs[trial.config] += 1
            self._always_busy = self._doubtful_runs[trial.config] > 2
        return not self._always_busy


def _killed_at(trial: Trial, deadline_seconds: float) -> bool:
    """Whether the trial was killed at this deadline, and not before because its pace was too slow."""
    return isinstance(trial.outcome, TimedOut) and trial.outcome.deadline_seconds >= deadline_seconds
