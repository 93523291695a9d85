"""Outcomes and trials: every kind survives JSON, with all its evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.operations.made_trials import make_trial

from autofit.core.device import work_kinds
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.outcome import (
    Crashed,
    Diverged,
    Fits,
    Measurement,
    Outcome,
    OutOfMemory,
    StepSeconds,
    TimedOut,
    Trial,
    Unsupported,
    outcome_from_json,
)
from autofit.core.prediction import Prediction, StepWork
from autofit.core.workload import Workload
from autofit.techniques import complete

FINITE = st.floats(allow_nan=False, allow_infinity=False)
BYTES = st.integers(0, 2**60)
TEXT = st.text(max_size=30)
MAYBE_TEXT = st.none() | TEXT
PHASE = st.none() | st.sampled_from(["build", "forward", "backward", "optimizer"])

MEASUREMENTS = st.builds(
    Measurement,
    tokens_per_second=FINITE,
    step_seconds=st.builds(StepSeconds, median=FINITE, p95=FINITE, relative_spread=FINITE),
    mfu=st.none() | FINITE,
    peak_allocated_bytes=BYTES,
    peak_reserved_bytes=BYTES,
    device_bytes=BYTES,
    host_peak_bytes=BYTES,
    host_baseline_bytes=BYTES,
    phase_peaks=st.dictionaries(st.sampled_from(["forward", "backward", "optimizer"]), BYTES),
    losses=st.lists(FINITE, min_size=1, max_size=5).map(tuple),
    reference_loss=st.none() | FINITE,
    steps=st.integers(1, 50),
    setup_seconds=FINITE,
    overhead_seconds=FINITE,
    leak_bytes_per_step=BYTES,
    expandable_segments=st.booleans(),
    stopped_early=st.booleans(),
    gradient_norms=st.lists(st.none() | FINITE, max_size=5).map(tuple),
)
KINDS: dict[type[Any], st.SearchStrategy[Any]] = {
    Fits: st.builds(Fits, measurement=MEASUREMENTS),
    OutOfMemory: st.builds(
        OutOfMemory, reason=TEXT, phase=PHASE, requested_bytes=st.none() | BYTES, signal=MAYBE_TEXT, host=st.booleans()
    ),
    TimedOut: st.builds(TimedOut, reason=TEXT, deadline_seconds=FINITE, phase=PHASE),
    Crashed: st.builds(
        Crashed,
        reason=TEXT,
        phase=PHASE,
        signal=MAYBE_TEXT,
        exit_code=st.none() | st.integers(-64, 255),
        stderr_tail=TEXT,
    ),
    Diverged: st.builds(
        Diverged,
        reason=TEXT,
        losses=st.lists(st.none() | FINITE, max_size=5).map(tuple),
        reference_loss=st.none() | FINITE,
    ),
    Unsupported: st.builds(Unsupported, reason=TEXT),
}
OUTCOMES = st.one_of(*KINDS.values())
PREDICTIONS = st.builds(
    Prediction,
    peak_allocated_bytes=BYTES,
    peak_reserved_bytes=st.none() | BYTES,
    device_bytes=BYTES,
    step_seconds=st.none() | FINITE,
    calibrated_on=st.integers(0, 1000),
    relative_error=st.none() | FINITE,
    work=st.none()
    | st.builds(
        StepWork,
        amounts=st.dictionaries(st.sampled_from(work_kinds.KINDS), FINITE),
        update=st.dictionaries(st.sampled_from(work_kinds.KINDS), FINITE),
        waits=st.dictionaries(st.sampled_from(work_kinds.TRANSFERS), FINITE),
        estimator=st.integers(0, 9),
    ),
)

TRIALS = st.builds(
    Trial,
    config=st.sampled_from([complete({}), complete({"method": "qlora", "rank": 64, "compile": True})]),
    workload=st.builds(Workload, model=TEXT, model_digest=st.just("0" * 16), lora_dropout=st.sampled_from([0.0, 0.1])),
    hardware=st.builds(
        Hardware, name=TEXT, kind=st.just("cuda"), device_name=TEXT, memory_bytes=BYTES, peak_flops=st.none() | FINITE
    ),
    stack=st.builds(Stack, python=TEXT, torch=TEXT, transformers=TEXT, peft=MAYBE_TEXT, cuda=MAYBE_TEXT),
    memory_limit_bytes=BYTES,
    outcome=OUTCOMES,
    seconds=FINITE,
    recorded_at=st.just("2026-01-02T03:04:05+00:00"),
    trial_id=st.none() | st.integers(1),
    prediction=st.none() | PREDICTIONS,
)


def through_json(data: Mapping[str, Any]) -> Any:
    """What arrives at the other side of a strict JSON document."""
    return json.loads(json.dumps(data, allow_nan=False))


def test_there_is_a_strategy_for_every_kind() -> None:
    assert set(KINDS) == set(Outcome.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@given(data=st.data())
def test_an_outcome_survives_json_unchanged(kind: type[Any], data: st.DataObject) -> None:
    outcome = data.draw(KINDS[kind])
    document = through_json(outcome.to_json())
    assert document["outcome"] == kind.kind
    again = outcome_from_json(document)
    assert type(again) is kind
    assert again == outcome


@given(TRIALS)
def test_a_trial_survives_json_unchanged(trial: Trial) -> None:
    again = Trial.from_json(through_json(trial.to_json()))
    assert again == trial
    assert again.trial_id == trial.trial_id
    assert again.to_json() == trial.to_json()


@given(TRIALS)
def test_a_trial_starts_with_the_keys_that_users_rely_on(trial: Trial) -> None:
    keys = list(trial.to_json())
    assert keys[:5] == ["outcome", "config", "hardware", "stack", "workload"]
    if isinstance(trial.outcome, Fits):
        assert keys[5] == "measurement"
    else:
        assert keys[5] == "reason"


@given(TRIALS)
def test_a_trial_that_nobody_predicted_says_nothing_of_it(trial: Trial) -> None:
    assert ("prediction" in trial.to_json()) == (trial.prediction is not None)


@given(PREDICTIONS, BYTES)
def test_a_prediction_fits_what_holds_its_device_memory(prediction: Prediction, limit: int) -> None:
    assert prediction.fits(limit) == (prediction.device_bytes <= limit)
    assert prediction.fits(prediction.device_bytes)


@given(MEASUREMENTS)
def test_a_measurement_sums_up_its_losses(measurement: Measurement) -> None:
    document = through_json(measurement.to_json())
    assert document["loss"] == {"first": measurement.losses[0], "last": measurement.losses[-1]}
    assert Measurement.from_json(document) == measurement


def test_reading_does_not_alter_what_is_read() -> None:
    document = OutOfMemory(reason="full", phase="backward").to_json()
    before = dict(document)
    outcome_from_json(document)
    assert document == before


def test_a_loss_that_is_not_finite_is_null_in_json() -> None:
    outcome = Diverged(reason="the loss is not finite", losses=(6.2, None), reference_loss=6.2)
    document = json.dumps(outcome.to_json(), allow_nan=False)
    assert "[6.2, null]" in document


@pytest.mark.parametrize("document", [{}, {"outcome": None}, {"outcome": "oom"}, {"outcome": "Fits"}])
def test_a_kind_that_does_not_exist_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no such outcome"):
        outcome_from_json(document)


def test_two_trials_are_equal_whatever_their_numbers_in_a_store() -> None:
    trial = make_trial({}, Unsupported(reason="no"))
    assert replace(trial, trial_id=7) == trial


@given(PREDICTIONS)
def test_what_was_not_yet_kept_when_a_prediction_was_stored_is_none(prediction: Prediction) -> None:
    body = prediction.to_json()
    del body["work"], body["peak_reserved_bytes"]
    assert Prediction.from_json(body) == replace(prediction, work=None, peak_reserved_bytes=None)


def test_work_that_an_earlier_version_counted_in_other_kinds_is_none() -> None:
    """Stores of before keep their trials; what was predicted for them teaches nothing."""
    before = {"flops": 1e15, "wide_flops": 0.0, "bytes": 1e9, "operations": 7.0, "moved_bytes": 0.0, "estimator": 10}
    fields = {
        "peak_allocated_bytes": 1,
        "device_bytes": 1,
        "step_seconds": 1.0,
        "calibrated_on": 0,
        "relative_error": 0.5,
    }
    assert Prediction.from_json({**fields, "work": before}).work is None
    amounts = {"amounts": {"launch": 7.0}, "estimator": 11}
    assert StepWork.from_json(amounts) == StepWork(amounts={"launch": 7.0}, estimator=11)
    assert StepWork.from_json({**amounts, "waiting_seconds": 1.0}) is None
