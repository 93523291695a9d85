"""Trials that met a busy device: run again, believed at last, and never in place of a clean one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from unit.operations.made_trials import fits, make_trial, out_of_memory
from unit.search.made_truth import FakePool, KeptTrials, Truth

from autofit.core.device.hardware import Hardware
from autofit.core.device.state import DeviceState, ProcessorState
from autofit.core.errors import EnvironmentLacks
from autofit.core.outcome import Crashed, Outcome, TimedOut, Trial
from autofit.core.units import GIB
from autofit.search.budget import Budget, Limits
from autofit.search.lattice_state import LatticeState
from autofit.search.scheduler import Scheduler
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed

QUIET = ProcessorState(cores=4, threads=4, busy_seconds=40.0, own_seconds=40.0, stolen_seconds=0.0)
CLEAN = DeviceState(seconds=10.0, processor=QUIET)
BUSY = DeviceState(seconds=10.0, processor=replace(QUIET, own_seconds=20.0))
LATE = TimedOut(reason="no end within 600 s", deadline_seconds=600.0)


class SharedPool(FakePool):
    """Workers whose device is in these states, one trial after another."""

    states: Iterator[DeviceState]

    def wait(self, timeout: float) -> list[Completed]:
        return [
            (request, replace(attempt, device_state=next(self.states))) for request, attempt in super().wait(timeout)
        ]


@pytest.fixture
def run(truth: Truth) -> Callable[..., tuple[list[Trial], list[Trial]]]:
    """Runs a config for each number in turn; returns the trials that are believed and all that were kept."""

    def run(
        states: list[DeviceState],
        configs: list[int],
        outcome: Outcome | None = None,
        kept: list[Trial] | None = None,
        **limits: int,
    ) -> tuple[list[Trial], list[Trial]]:
        pool = SharedPool(truth, special=lambda request: outcome)
        pool.states = iter(states)
        kept = [] if kept is None else kept
        budget = Budget(limits=Limits(memory_bytes=32 * GIB, **limits))
        runs = Scheduler(budget=budget, open_pool=lambda: pool, sink=KeptTrials(kept))
        believed = []
        for number in configs:
            config = truth.lattice.configs[number]
            runs.begin(TrialRequest(job=truth.job, config=config, memory_limit_bytes=32 * GIB, deadline_seconds=60.0))
            while runs.in_flight:
                believed += runs.collect()[0]
        assert next(pool.states, None) is None
        return believed, kept

    return run


def test_a_clean_repeat_is_believed(run: Callable[..., tuple[list[Trial], list[Trial]]]) -> None:
    believed, kept = run([BUSY, BUSY, CLEAN], [0])
    assert [t.device_state for t in believed] == [CLEAN] and len(kept) == 3


def test_a_machine_that_is_always_busy_is_believed_and_not_asked_again_and_again(
    run: Callable[..., tuple[list[Trial], list[Trial]]],
) -> None:
    believed, kept = run([BUSY, BUSY, BUSY, BUSY, CLEAN, BUSY, CLEAN], [0, 1, 2, 3])
    # Three of the first, one of the second; once it was quiet, there is hope again.
    assert [bool(t.doubts) for t in believed] == [True, True, False, False]
    assert [kept.count(t) for t in believed] == [1] * 4 and len(kept) == 7


def test_no_repeat_is_begun_beyond_the_limit(run: Callable[..., tuple[list[Trial], list[Trial]]]) -> None:
    believed, _ = run([BUSY, BUSY], [0], max_trials=2)
    assert [bool(t.doubts) for t in believed] == [True]


def test_memory_is_believed_whatever_the_device_did(run: Callable[..., tuple[list[Trial], list[Trial]]]) -> None:
    believed, kept = run([BUSY], [0], outcome=out_of_memory())
    assert believed == kept and believed[0].doubts == ()


def test_a_device_that_is_gone_ends_the_search_at_once_with_all_that_was_measured(
    run: Callable[..., tuple[list[Trial], list[Trial]]],
) -> None:
    kept: list[Trial] = []
    gone = Crashed(reason="rank 1: the device is gone: GPU is lost", transient=True)
    with pytest.raises(EnvironmentLacks, match=r"GPU is lost; everything measured is kept \(check nvidia-smi"):
        run([CLEAN], [0], outcome=gone, kept=kept)
    assert [t.outcome for t in kept] == [gone]


def test_torch_without_kernels_for_the_device_ends_the_search_at_once(
    run: Callable[..., tuple[list[Trial], list[Trial]]],
) -> None:
    kept: list[Trial] = []
    crashed = Crashed(reason="torch 2.12.0 has no kernels for Tesla V100: install another build", transient=True)
    with pytest.raises(EnvironmentLacks, match="has no kernels for Tesla V100"):
        run([CLEAN], [0], outcome=crashed, kept=kept)
    assert [t.outcome for t in kept] == [crashed]


CPU = Hardware(name="cpu-of-tests", kind="cpu", device_name="Some CPU", memory_bytes=32 * GIB, cores=4)
CONFIG: dict[str, object] = {"method": "full", "micro_batch": 1}


def tried(outcome: Outcome, state: DeviceState | None) -> Trial:
    return replace(make_trial(CONFIG, outcome, limit=10 * GIB), hardware=CPU, device_state=state)


def test_a_search_does_not_unlearn_a_clean_time(truth: Truth) -> None:
    state = LatticeState(truth.lattice, 10 * GIB)
    config = truth.lattice.configs[0]
    clean, busy = (replace(t, config=config) for t in (tried(fits(4, 100), CLEAN), tried(fits(4, 60), BUSY)))
    for trial in (clean, busy):
        state.learn(trial)
    assert state.trials[config] == clean and state.runs(config) == 2
    state.learn(replace(clean, outcome=fits(4, 90)))
    assert [p.measurement.tokens_per_second for p in state.measured()] == [90.0]


def test_what_a_doubted_trial_shows_of_its_step_is_no_proof(truth: Truth) -> None:
    """It counts for all that: a machine that is always busy would show nothing else."""
    config = truth.lattice.configs[0]
    cut = replace(LATE, least_step_seconds=100.0, is_proven=True)
    for seen, proven in ((BUSY, {}), (CLEAN, {config: 100.0})):
        state = LatticeState(truth.lattice, 32 * GIB)
        state.take(config)
        trial = replace(make_trial(config, cut, job=truth.job), device_state=seen)
        assert bool(trial.doubts) is (seen is BUSY)
        state.learn(trial)
        assert state.least_step_seconds == {config: 100.0} and state.proven_step_seconds == proven


def test_a_measured_time_refutes_every_bound_on_it(truth: Truth) -> None:
    """Also one that the store has, from before or after."""
    config = truth.lattice.configs[0]
    slow = make_trial(config, replace(LATE, least_step_seconds=100.0, is_proven=True), job=truth.job)
    measured = make_trial(config, fits(4, 90), job=truth.job)
    for order in ((slow, measured), (measured, slow), (slow, measured, slow)):
        state = LatticeState(truth.lattice, 32 * GIB)
        for trial in order:
            state.learn(trial)
        assert (state.least_step_seconds, state.proven_step_seconds) == ({}, {})
    state = LatticeState(truth.lattice, 32 * GIB)
    state.recall_bounds([slow, measured])
    assert state.least_step_seconds == {config: 100.0}
    state.recall(measured, [slow, measured])
    assert state.least_step_seconds == {}
