"""What trials cost: as many micro-steps as they run, whatever a step accumulates, and all of each update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from unit.operations.made_trials import fits, make_job, make_trial
from unit.search.made_truth import plan_of, predicted

from autofit.core.lattice import Config, Lattice
from autofit.core.outcome import Fits, TimedOut
from autofit.core.units import GIB
from autofit.planning.plan import Limits
from autofit.search.acquisition.trial_costs import TrialCosts
from autofit.search.budget import Budget
from autofit.search.lattice_state import LatticeState
from autofit.techniques import AXES, complete
from autofit.trial.measure.pace import running_seconds

BATCH = 64
CONFIGS = tuple(complete({"method": "lora", "micro_batch": size}) for size in (1, 2, 32, 64))
MICRO_STEPS = [2, 2, 2, 1]
"""Of each config's trial."""
MICRO_SECONDS = 0.5
"""Of a micro-step of one sequence; of more, as many times as much."""


def costs_of(*configs: Config, **changes: Any) -> TrialCosts:
    """Those of configs for a batch of `BATCH` sequences; `changes` are of the workload."""
    job, state = make_job(), LatticeState(Lattice(axes=AXES, configs=configs), GIB)
    workload = replace(job.workload, global_batch=BATCH, **changes)
    return TrialCosts(plan_of(state, job=replace(job, workload=workload)))


def step_seconds(update: float = 0.0) -> np.ndarray:
    """Of the whole global batch of every config: all have the same work."""
    return np.full(len(CONFIGS), BATCH * MICRO_SECONDS + update)


def running(costs: TrialCosts, update: float = 0.0) -> list[float]:
    """Seconds of each config's trial beyond its set-up."""
    rows = np.arange(len(CONFIGS))
    beyond_set_up = costs.seconds({}, rows, step_seconds(update)) - costs.seconds({}, rows, np.zeros(len(CONFIGS)))
    return [float(seconds) + running_seconds(0.0, 3.0) for seconds in beyond_set_up]


def test_accumulation_does_not_multiply_what_a_trial_costs() -> None:
    """At 1 sequence of 64, two micro-steps of half a second are a trial's step, and not 32 s."""
    steps = [2 * MICRO_SECONDS, 4 * MICRO_SECONDS, 64 * MICRO_SECONDS, 64 * MICRO_SECONDS]
    seconds = running(costs_of(*CONFIGS))
    assert seconds == pytest.approx([running_seconds(step, 3.0, n) for step, n in zip(steps, MICRO_STEPS, strict=True)])
    assert seconds[0] < 10.0 < seconds[3]


def test_a_users_program_runs_whole_steps() -> None:
    steps = [running_seconds(64 * MICRO_SECONDS, 3.0, n) for n in (64, 32, 2, 1)]
    assert running(costs_of(*CONFIGS, program="train.py")) == pytest.approx(steps)


def test_where_ranks_or_a_host_share_the_work_a_trial_runs_three_micro_steps() -> None:
    config = complete({"method": "lora", "micro_batch": 1, "offload": "optimizer"})
    costs = costs_of(config)
    (alone,), (running_too,) = (
        costs.seconds({}, np.array([0]), np.array([each])) for each in (0.0, BATCH * MICRO_SECONDS)
    )
    expected = running_seconds(3 * MICRO_SECONDS, 3.0, 3) - running_seconds(0.0, 3.0, 3)
    assert running_too - alone == pytest.approx(expected)


def test_an_update_counts_in_full() -> None:
    """A step has one, whether it runs two micro-steps or 64."""
    update = 3.5
    costs = costs_of(*CONFIGS)
    costs.use(
        {
            config: replace(
                predicted(1, BATCH * MICRO_SECONDS + update),
                micro_step_seconds=config.number("micro_batch") * MICRO_SECONDS,
            )
            for config in CONFIGS
        }
    )
    steps = [2 * MICRO_SECONDS, 4 * MICRO_SECONDS, 64 * MICRO_SECONDS, 64 * MICRO_SECONDS]
    expected = [running_seconds(step + update, 3.0, n) for step, n in zip(steps, MICRO_STEPS, strict=True)]
    assert running(costs, update) == pytest.approx(expected)


def test_set_ups_are_learnt_from_trials_without_their_warm_up() -> None:
    """A trial reports set-up and warm-up together. One that was cut during its steps shows nothing of its set-up; one
    that never began any took at least as long."""
    costs, job = costs_of(*CONFIGS), make_job()
    (first, second, *_), rows, no_steps = CONFIGS, np.arange(len(CONFIGS)), np.zeros(len(CONFIGS))

    def set_up(outcome: Fits | TimedOut, config: Config = first) -> float:
        return float(costs.seconds({config: make_trial(config, outcome, job=job)}, rows, no_steps)[0])

    before = float(costs.seconds({}, rows, no_steps)[0])
    measured = fits(1.0, 512 / 32.0).measurement  # two warm-up steps of 1 s each
    quick, slow = (
        Fits(measurement=replace(measured, setup_seconds=2.0 + set_up_seconds)) for set_up_seconds in (2.0, 60.0)
    )
    assert set_up(quick) < before < set_up(slow)
    assert set_up(TimedOut(reason="cut", deadline_seconds=99.0, least_step_seconds=9.0), second) == before
    assert set_up(TimedOut(reason="no step", deadline_seconds=99.0), second) > before


@pytest.mark.parametrize(("expected", "allowed"), [(5.0, 21.0), (13.0, 21.0), (20.0, 30.0), (60.0, 90.0)])
def test_a_trial_may_take_a_tenth_of_the_budget_or_half_more_than_was_expected(expected: float, allowed: float) -> None:
    """On an H200, trials that were expected to take nearly a tenth of 210 s were cut after it, with one step to go."""
    budget = Budget(limits=Limits(memory_bytes=1, seconds=210.0))
    assert budget.allowance_seconds(expected) == pytest.approx(allowed)
