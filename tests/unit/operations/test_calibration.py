"""How fast a device is, learnt from the trials in the store."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from unit.operations.made_trials import (
    HARDWARE,
    OLDER,
    STACK,
    WORK,
    crashed,
    fits,
    make_job,
    make_prediction,
    make_trial,
)
from unit.store.test_store_failures import sql

from autofit.core.device.hardware import Hardware
from autofit.core.device.state import CardState, DeviceState
from autofit.core.device.work_kinds import HOST_LINK
from autofit.core.outcome import Outcome, Trial
from autofit.core.prediction import StepWork
from autofit.estimate.time.guessed_rates import prior
from autofit.estimate.time.roofline import Rates, seconds
from autofit.estimate.time.transfers import seconds_per_byte
from autofit.prediction.calibration import Calibration, rates_for
from autofit.store import Store
from autofit.techniques import Job

CARD = Hardware(name="h100-80g", kind="cuda", device_name="h100-80g", memory_bytes=1, capability="9.0")
"""As the catalog knows it, without a machine that has it."""


def guess() -> Rates:
    result = prior(HARDWARE)
    assert result is not None
    return result


def slower(factor: float, work: StepWork = WORK) -> Outcome:
    """What a device that takes so many times the guess shows, at 512 tokens a step."""
    return fits(10, 512 / (factor * seconds(work, guess())))


def predicted(outcome: Outcome, *, work: StepWork | None = WORK, job: Job | None = None, **config: object) -> Trial:
    return replace(make_trial({"method": "lora", **config}, outcome, job=job), prediction=make_prediction(work=work))


def factor(found: Rates | None) -> float:
    assert found is not None
    return seconds(WORK, found) / seconds(WORK, guess())


def test_without_a_store_or_trials_that_show_anything_the_guess_stands(store: Store) -> None:
    assert rates_for(make_job(), None) == guess()
    store.add(make_trial({"method": "lora"}, slower(2)))
    store.add(predicted(slower(2), work=None))
    store.add(predicted(slower(2), work=OLDER))
    store.add(predicted(crashed()))
    job = make_job()
    store.add(predicted(slower(2), job=replace(job, workload=replace(job.workload, program="python train.py"))))
    assert rates_for(make_job(), store) == guess()


def test_trials_of_any_model_and_workload_count_once_for_each_config(store: Store) -> None:
    longer = make_job()
    longer = replace(longer, workload=replace(longer.workload, model="another", model_digest="0", seq_len=1024))
    for trial in (predicted(slower(9)), predicted(slower(2)), predicted(slower(2), job=longer)):
        store.add(trial)
    store.add(predicted(slower(2), rank=16))
    result = rates_for(make_job(), store)
    assert result is not None and result.calibrated_on == 3
    assert factor(result) == pytest.approx(2, rel=1e-3)
    assert result.relative_error < 1e-3


def test_what_other_workloads_show_is_as_uncertain_as_they_are_of_one_another(store: Store) -> None:
    job = make_job()

    def of(length: int, times: float) -> None:
        other = replace(job, workload=replace(job.workload, seq_len=length))
        for rank in (8, 16, 32):
            store.add(predicted(slower(times), job=other, rank=rank))

    of(1024, 2.0)
    alone = rates_for(make_job(), store)
    assert alone is not None and alone.relative_error == pytest.approx(0.5)  # what the guess misses them by
    assert factor(alone) == pytest.approx(2, rel=1e-3)
    of(512, 2.2)
    both = rates_for(make_job(), store)
    assert both is not None and 0.08 < both.relative_error < 0.11
    covered = rates_for(replace(job, workload=replace(job.workload, seq_len=512)), store)
    assert covered is not None and covered.relative_error < both.relative_error and factor(covered) == factor(both)


def test_many_trials_of_another_workload_are_one_sign_that_the_guess_is_right(store: Store) -> None:
    """They do not show how much workloads differ."""
    job = make_job()
    other = replace(job, workload=replace(job.workload, seq_len=1024))
    for rank in range(1, 21):
        store.add(predicted(slower(1.0), job=other, rank=rank))
    result = rates_for(make_job(), store)
    assert result is not None and result.calibrated_on == 20
    assert result.relative_error == pytest.approx(guess().relative_error / 2)
    covered = rates_for(other, store)
    assert covered is not None and covered.relative_error < 0.01


def test_other_hardware_and_other_stacks_show_nothing(store: Store) -> None:
    store.add(predicted(slower(2), job=make_job(hardware=replace(HARDWARE, device_name="NVIDIA H100 NVL"))))
    store.add(predicted(slower(2), job=make_job(stack=replace(STACK, torch="2.14.0"))))
    assert rates_for(make_job(), store) == guess()


def test_runs_of_users_programs_hide_and_show_nothing(store: Store) -> None:
    """However many there are, and whatever stack they ran under."""
    for rank, speed in ((8, 2), (8, 2.4), (16, 2)):
        store.add(predicted(slower(speed), rank=rank))
    here, elsewhere = make_job(), make_job(hardware=CARD)
    before = [Calibration.of(job, store) for job in (here, elsewhere)]
    between = store.between_executions(HARDWARE.key)
    assert before[0].rates != guess() and between > 0.01
    newer = make_job(stack=replace(STACK, torch="2.14.0"))
    for number in range(60):
        job = newer if number % 2 else here
        workload = replace(job.workload, program=f"python train.py {number % 20}")
        store.add(predicted(slower(9 + number), job=replace(job, workload=workload)))
    assert [Calibration.of(job, store) for job in (here, elsewhere)] == before
    assert store.between_executions(HARDWARE.key) == between


def test_a_card_that_is_not_here_is_as_fast_as_the_one_that_was_measured(store: Store) -> None:
    store.add(predicted(slower(7), job=make_job(stack=replace(STACK, torch="2.12.0"))))
    store.add(predicted(slower(3)))
    here = replace(STACK, torch="2.13.0+cpu")
    assert factor(rates_for(make_job(hardware=CARD, stack=here), store)) == pytest.approx(3, rel=1e-3)
    another = replace(CARD, name="a100-80g", device_name="a100-80g")
    assert factor(rates_for(make_job(hardware=another, stack=here), store)) != pytest.approx(3)


def test_a_card_outside_the_catalog_is_as_fast_as_its_own_trials(store: Store) -> None:
    unlisted = replace(HARDWARE, name="rtx-a6000-48g", device_name="NVIDIA RTX A6000", capability="8.6")
    first = rates_for(make_job(hardware=unlisted), store)
    assert first is not None and first.calibrated_on == 0 and first.stand_in is not None
    for rank in (8, 16, 32):
        trial = predicted(fits(10, 512 / (3 * seconds(WORK, first))), job=make_job(hardware=unlisted), rank=rank)
        store.add(trial)
    result = rates_for(make_job(hardware=unlisted), store)
    assert result is not None and (result.calibrated_on, result.relative_error < 0.1) == (3, True)
    assert seconds(WORK, result) == pytest.approx(3 * seconds(WORK, first), rel=1e-3)


def test_trials_with_offload_correct_the_guess_of_what_they_wait_for(store: Store) -> None:
    """Other trials alone show the device's own speed."""
    waited = 4 * seconds(WORK, guess())
    waiting = replace(WORK, waits={HOST_LINK: waited / seconds_per_byte(HARDWARE)[HOST_LINK]})
    for rank in (8, 16, 32):
        store.add(predicted(slower(2), rank=rank))
    before = rates_for(make_job(), store)
    taken = 2 * seconds(WORK, guess()) + 3 * waited
    for offload in ("optimizer", "params"):
        store.add(predicted(fits(10, 512 / taken), work=waiting, offload=offload))
    store.add(predicted(slower(9), sharding="ddp"))
    after = rates_for(make_job(), store)
    assert before is not None and after is not None
    assert (before.waiting, after.calibrated_on) == (1.0, 5), "what only communicates shows nothing here"
    assert after.as_array() == pytest.approx(before.as_array())
    assert seconds(waiting, after) == pytest.approx(taken, rel=0.15)


def test_a_trial_of_a_throttled_card_teaches_nothing_where_its_config_has_another(store: Store) -> None:
    hot = CardState(uuid="GPU-a", throttle_mask=0x20)
    store.add(predicted(slower(2)))
    store.add(replace(predicted(slower(9)), device_state=DeviceState(seconds=1.0, cards=(hot,))))
    assert factor(rates_for(make_job(), store)) == pytest.approx(2.0)


def test_a_store_that_fails_costs_the_calibration_alone(
    store: Store, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.add(predicted(slower(2)))
    sql(f"sqlite:///{path}", "DROP TABLE trials")
    with caplog.at_level(logging.WARNING):
        assert Calibration.of(make_job(), store) == Calibration.of(make_job(), None)
    assert len(caplog.records) == 1 and "not calibrated by trials" in caplog.text
