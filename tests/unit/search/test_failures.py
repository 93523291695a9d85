"""Workers that are lost: what that costs a search and a config, and when it ends the search."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from unit.search.made_truth import WITHIN_TIES, FakePool, Run, Truth, prepare

from autofit.core.errors import EnvironmentLacks
from autofit.core.outcome import Crashed, Outcome
from autofit.core.units import GIB
from autofit.search.failures import MACHINERY_FAILURES, MOST_LOST_WORKERS
from autofit.trial.attempt import Attempt
from autofit.trial.process.classify import DEVICE_GONE
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed

LOST = Crashed(reason="its Ray worker was lost: the node has died", transient=True, worker_lost=True)
DEVICES = 8
"""Of one node."""


def search(truth: Truth, after: Run | None = None) -> Run:
    """On a node of eight devices; `after` another search."""
    run = prepare(truth, 16 * GIB, size=DEVICES, earlier=None if after is None else after.attempts())
    run.pool.checks.clear()  # which hold it to run nothing twice
    return run


@pytest.mark.parametrize("begun", [0, 12], ids=["at first", "later"])
def test_a_lost_node_of_eight_devices_ends_no_search(truth: Truth, begun: int) -> None:
    run = search(truth)

    def lost(request: TrialRequest) -> Outcome | None:
        doomed = run.pool.submitted[begun : begun + DEVICES]
        return LOST if any(request is one for one in doomed) else None

    run.pool.special = lost
    run.search.run()
    failed = [trial for trial in run.saved if trial.outcome == LOST]
    assert len(failed) == DEVICES, "each is kept, with what is known of it"
    assert all(run.search.state.trials[trial.config].outcome != LOST for trial in failed), "and was run again"
    assert run.regret < WITHIN_TIES


def test_workers_that_are_always_lost_end_the_search_with_the_reason(truth: Truth) -> None:
    run = search(truth)
    run.pool.special = lambda request: LOST
    with pytest.raises(EnvironmentLacks, match=r"3 trials in a row .*its Ray worker was lost"):
        run.search.run()
    assert len(run.saved) <= MACHINERY_FAILURES * DEVICES


def test_a_config_that_ends_its_worker_is_left_out_for_good(truth: Truth, caplog: pytest.LogCaptureFixture) -> None:
    plain = search(truth)
    plain.search.run()
    deadly = plain.pool.submitted[0].config
    run = search(truth)
    run.pool.special = lambda request: LOST if request.config == deadly else None
    run.search.run()
    assert [r.config for r in run.pool.submitted].count(deadly) == MOST_LOST_WORKERS
    assert not caplog.records

    resumed = search(truth, after=run)
    resumed.search.run()
    assert deadly not in {request.config for request in resumed.pool.submitted}
    assert str(deadly) in caplog.text and "--fresh" in caplog.text


def test_the_workers_that_a_config_has_cost_are_counted_over_all_searches(truth: Truth) -> None:
    first = search(truth)
    first.search.run()
    deadly = first.pool.submitted[0].config
    interrupted = search(truth)
    interrupted.pool.special = lambda request: LOST if request.config == deadly else None

    def interrupt() -> None:
        if any(trial.outcome == LOST for trial in interrupted.saved):
            raise KeyboardInterrupt

    interrupted.pool.on_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        interrupted.search.run()
    resumed = search(truth, after=interrupted)
    resumed.pool.special = interrupted.pool.special
    resumed.search.run()
    assert [r.config for r in resumed.pool.submitted].count(deadly) == MOST_LOST_WORKERS - 1


FAILS = Crashed(reason="the device has failed: CUDA error: unknown error", transient=True)
GONE = Crashed(reason=f"{DEVICE_GONE}: GPU is lost", transient=True)
QUICK = 7
"""Trials of a worker that fails, in the time of one that does not."""


@dataclass
class NamedWorkers(FakePool):
    """Workers that have names, of which the first that is idle gets the next trial, as Ray's do. Those in `bad` fail
    every trial, and soon."""

    bad: dict[str, Outcome] = field(default_factory=dict)
    names: list[str] = field(default_factory=lambda: [f"w{number}" for number in range(DEVICES)])
    ran: list[tuple[str, TrialRequest]] = field(default_factory=list)
    _begun: list[tuple[float, str, TrialRequest]] = field(default_factory=list)
    _time: float = 0.0

    def leave_out(self, worker: str, reason: str) -> bool:
        if len(self.names) == 1:
            return worker not in self.names
        if worker in self.names:
            self.names.remove(worker)
            self.size -= 1
        return True

    def submit(self, request: TrialRequest) -> None:
        self.submitted.append(request)
        self._running.append(request)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._running and (idle := [n for n in self.names if n not in {worker for _, worker, _ in self._begun}]):
            request, worker = self._running.pop(0), idle[0]
            self.ran.append((worker, request))
            sound = QUICK * (1.0 + self.truth.uncertain("seconds", len(self.ran)).random())
            self._begun.append((self._time + (1.0 if worker in self.bad else sound), worker, request))

    def wait(self, timeout: float) -> list[Completed]:
        self._dispatch()
        self._time, worker, request = first = min(self._begun, key=lambda begun: begun[0])
        self._begun.remove(first)
        self.returned += 1
        outcome = self.bad.get(worker) or self.special(request)
        outcome = outcome or self.truth.outcome(request.config, request.memory_limit_bytes, len(self.ran))
        return [(request, Attempt(outcome=outcome, seconds=self.seconds, worker=worker))]


def with_bad(truth: Truth, bad: dict[str, Outcome]) -> tuple[Run, NamedWorkers]:
    """A search on eight workers, some of them bad."""
    run, pool = search(truth), NamedWorkers(truth, size=DEVICES, bad=bad)
    run.search.open_pool = lambda: pool
    return run, pool


@pytest.mark.parametrize(
    ("bad", "each"),
    [
        ({"w0": FAILS}, 2),
        ({"w7": FAILS}, 2),
        ({"w0": GONE}, 1),
        ({"w0": FAILS, "w1": FAILS, "w4": FAILS}, 2),
        ({f"w{number}": GONE for number in range(DEVICES - 1)}, 1),
    ],
    ids=["the first", "the last", "gone", "three", "all but one gone"],
)
def test_bad_workers_get_no_more_trials_and_the_search_goes_on(
    truth: Truth, bad: dict[str, Outcome], each: int
) -> None:
    run, pool = with_bad(truth, bad)
    run.search.run()
    assert [sum(worker == name for worker, _ in pool.ran) for name in bad] == [each] * len(bad)
    assert not any(isinstance(trial.outcome, Crashed) for trial in run.search.state.trials.values()), "all ran again"
    assert run.regret < WITHIN_TIES


def test_what_a_bad_worker_has_failed_counts_against_no_config(truth: Truth) -> None:
    """The first config fails twice there and, by chance, a third time elsewhere."""
    run, pool = with_bad(truth, {"w0": FAILS})

    def again(request: TrialRequest) -> Outcome | None:
        times = [r.config for _, r in pool.ran].count(request.config)
        return FAILS if request.config == pool.ran[0][1].config and times == 3 else None

    pool.special = again
    run.search.run()
    config = pool.ran[0][1].config
    assert [worker == "w0" for worker, r in pool.ran if r.config == config][:4] == [True, True, False, False]
    assert not isinstance(run.search.state.trials[config].outcome, Crashed)


def test_a_config_that_fails_everywhere_costs_two_workers_at_most(truth: Truth) -> None:
    run, pool = with_bad(truth, {})
    pool.special = lambda request: FAILS if request.config == pool.ran[0][1].config else None
    run.search.run()
    config = pool.ran[0][1].config
    assert isinstance(run.search.state.trials[config].outcome, Crashed)
    assert len(pool.names) == DEVICES - 2


@pytest.mark.parametrize("outcome", [FAILS, GONE], ids=["fail", "gone"])
def test_workers_that_are_all_bad_end_the_search_with_the_reason(truth: Truth, outcome: Crashed) -> None:
    run, pool = with_bad(truth, {f"w{number}": outcome for number in range(DEVICES)})
    with pytest.raises(EnvironmentLacks, match=outcome.reason):
        run.search.run()
    assert len(pool.names) == 1
