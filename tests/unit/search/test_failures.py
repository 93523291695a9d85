"""Workers that are lost: what that costs a search and a config, and when it ends the search."""

from __future__ import annotations

import pytest
from unit.search.made_truth import WITHIN_TIES, Run, Truth, prepare

from autofit.core.errors import EnvironmentLacks
from autofit.core.outcome import Crashed, Outcome
from autofit.core.units import GIB
from autofit.search.failures import MACHINERY_FAILURES, MOST_LOST_WORKERS
from autofit.trial.request import TrialRequest

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
