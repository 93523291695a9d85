"""A search of which a node turns out to be slow: what it has measured there counts no longer, and is run again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from unit.operations.made_trials import fits, make_trial
from unit.search.made_truth import WITHIN_TIES, FakePool, Run, Truth, prepare

from autofit.core.outcome import Fits, TimedOut, Trial
from autofit.core.units import GIB
from autofit.core.verdict import verdict
from autofit.search.lattice_state import LatticeState, answers
from autofit.trial.attempt import Attempt
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed

WHY = "n1 is slow: products in bf16 run there at 61% of the speed usual for h100-80g here"
SLOWER = 1 / 0.61
ON_FIRST = 8


@dataclass
class TwoNodes(FakePool):
    """The first trials run on n1, whose steps take longer; then that is found out."""

    found_after: int = ON_FIRST

    def wait(self, timeout: float) -> list[Completed]:
        done = [self._where(request, attempt) for request, attempt in super().wait(timeout)]
        if self.returned >= self.found_after:
            self.set_aside = {"n1": WHY}
        return done

    def _where(self, request: TrialRequest, attempt: Attempt) -> Completed:
        on_first = self.returned <= ON_FIRST
        outcome = attempt.outcome
        if on_first and isinstance(outcome, Fits):
            outcome = Fits(measurement=outcome.measurement.slowed(SLOWER))
        return request, replace(attempt, outcome=outcome, worker="n1" if on_first else "n2")


def searched(truth: Truth, found_after: int) -> tuple[Run, list[Trial]]:
    """The search, and the trials that it has set aside after they were kept."""
    run, aside = prepare(truth, 16 * GIB), []
    pool = TwoNodes(truth, found_after=found_after)
    run.search.open_pool = lambda: pool
    run.log.set_aside = lambda trial, reason: aside.append(trial.set_aside(reason))  # type: ignore[method-assign]
    run.search.run()
    run.pool = pool
    return run, aside


@pytest.mark.parametrize("found_after", [4, 8, 10])
def test_what_a_slow_node_has_measured_counts_for_nothing(truth: Truth, found_after: int) -> None:
    """Whether it is found out while it still runs trials, at once, or later."""
    run, aside = searched(truth, found_after)
    kept = {trial.trial_id: trial for trial in [*run.saved, *aside]}
    of_first = [kept[number] for number in range(1, ON_FIRST + 1)]
    assert len(run.saved) > ON_FIRST
    fitted = [trial for trial in of_first if isinstance(trial.outcome, Fits)]
    assert fitted and all(trial.why_set_aside and trial.doubts == (WHY,) for trial in fitted)
    assert not any(trial.why_set_aside for trial in of_first if not isinstance(trial.outcome, Fits)), "memory is memory"
    assert not any(trial.why_set_aside for trial in run.search.state.trials.values())
    assert {point.trial_id for point in run.search.state.points()} <= {t.trial_id for t in run.saved[ON_FIRST:]}
    assert run.regret < WITHIN_TIES
    assert run.progress.slow_nodes == (WHY,)
    trials_by_config = run.attempts()
    for trial in aside:
        trials_by_config[trial.config] = [kept[t.trial_id] for t in trials_by_config[trial.config]]
    stored = answers(trials_by_config, truth.lattice, 16 * GIB)
    assert not any(trial.why_set_aside for trial in stored.values()), "nor for the next search"


def test_a_trial_that_is_set_aside_settles_nothing_even_alone(truth: Truth) -> None:
    config = truth.best(16 * GIB)
    assert config is not None
    sound, aside = truth.trial(config, 16 * GIB), truth.trial(config, 16 * GIB, 1).set_aside(WHY)
    assert verdict([aside], 16 * GIB) is None
    assert verdict([sound, aside], 16 * GIB) is sound
    assert sound.timed_in_full and not aside.timed_in_full


def test_what_other_trials_have_shown_stays_when_one_is_set_aside(truth: Truth) -> None:
    """Of a config that ended early twice, once of a slow node: the other bound counts, and so does its attempt."""
    state, config = LatticeState(truth.lattice, 16 * GIB), truth.lattice.configs[0]

    def cut(least: float) -> Trial:
        outcome = TimedOut(reason="cut", deadline_seconds=60.0, least_step_seconds=least, is_proven=True)
        return make_trial(config, outcome, job=truth.job)

    sound, slow = cut(2.0), cut(9.0)
    for trial in (sound, slow):
        state.take(config)
        state.learn(trial)
    state.set_aside(slow, WHY)
    assert state.least_step_seconds == state.proven_step_seconds == {config: 2.0} and config in state.open
    state.take(config)
    state.learn(cut(2.0))
    assert config in state.trials, "a second sound one ends early for the same reason"


def test_a_bound_counts_again_once_the_fit_that_replaced_it_is_set_aside(truth: Truth) -> None:
    state, config = LatticeState(truth.lattice, 16 * GIB), truth.lattice.configs[0]
    outcome = TimedOut(reason="cut", deadline_seconds=60.0, least_step_seconds=2.0)
    bound, fitted = (make_trial(config, o, job=truth.job) for o in (outcome, fits(4, 90)))
    for trial in (bound, fitted):
        state.take(config)
        state.learn(trial)
    state.set_aside(fitted, WHY)
    assert state.least_step_seconds == {config: 2.0} and config in state.open
