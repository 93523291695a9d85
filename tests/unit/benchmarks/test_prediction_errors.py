"""Errors of predictions, against errors worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import prediction_errors
import pytest
from unit.operations.made_trials import HARDWARE, OLDER, WORK, crashed, fits, make_job, make_trial, out_of_memory

from autofit.core.outcome import Outcome, OutOfMemory, Trial
from autofit.core.prediction import Prediction
from autofit.core.units import GIB


def predicted(
    values: dict[str, object],
    outcome: Outcome,
    gib: float,
    *,
    seconds: float | None = None,
    calibrated_on: int = 0,
    limit: int = 80 * GIB,
) -> Trial:
    """A trial for which `gib` of device memory, all of it reserved and 0.9 times that allocated, were predicted."""
    prediction = Prediction(
        peak_allocated_bytes=int(0.9 * gib * GIB),
        peak_reserved_bytes=int(gib * GIB),
        device_bytes=int(gib * GIB),
        step_seconds=seconds,
        calibrated_on=calibrated_on,
        relative_error=None,
        work=WORK,
    )
    return replace(make_trial(values, outcome, limit=limit), prediction=prediction)


def group(found: list[dict[str, Any]], technique: str) -> dict[str, Any]:
    return next(one for one in found if (one["hardware"], one["technique"]) == (HARDWARE.name, technique))


def test_a_distribution_by_hand() -> None:
    errors = [0.01 * number for number in range(1, 20)] + [-0.5]
    assert prediction_errors.distribution(errors) == {
        "count": 20,
        "median": pytest.approx(0.095),
        "median_absolute": pytest.approx(0.105),
        "p95_absolute": pytest.approx(0.19),
        "worst": -0.5,
    }
    alone = dict.fromkeys(("median", "median_absolute", "p95_absolute", "worst"), 0.25)
    assert prediction_errors.distribution([0.25]) == {"count": 1, **alone}


def test_errors_per_hardware_method_and_technique() -> None:
    lora, full = {"method": "lora", "rank": 8}, {"method": "full", "checkpointing": "full"}
    result = prediction_errors.groups(
        [
            predicted(lora, fits(10, 512), 11, seconds=1.5, calibrated_on=5),
            predicted(full, fits(20, 512, allocated=10), 18, seconds=0.5),
            make_trial(full, fits(20, 512)),
            predicted(full, crashed(), 18),
        ]
    )
    assert group(result, "all")["fit"]["judged"] == 2
    everything = group(result, "all")
    assert {name: (e["count"], e["worst"]) for name, e in everything["errors"].items()} == {
        "peak_allocated_bytes": (2, pytest.approx(0.62)),
        "peak_reserved_bytes": (2, pytest.approx(0.1)),
        "device_bytes": (2, pytest.approx(0.1)),
        "step_seconds": (1, pytest.approx(0.5)),
        "step_seconds_uncalibrated": (1, pytest.approx(-0.5)),
    }
    assert everything["errors"]["device_bytes"]["median"] == pytest.approx(0.0)
    assert everything["errors"]["device_bytes"]["median_absolute"] == pytest.approx(0.1)
    for technique in ("method=lora", "rank=8"):
        assert group(result, technique)["errors"]["device_bytes"]["median"] == pytest.approx(0.1)
    for technique in ("method=full", "checkpointing=full"):
        assert group(result, technique)["errors"]["device_bytes"]["median"] == pytest.approx(-0.1)
        assert "step_seconds" not in group(result, technique)["errors"]
    assert group(result, "compile=false")["fit"]["judged"] == 2


def test_trials_of_before_reserved_memory_was_predicted_have_no_error_of_it() -> None:
    trial = predicted({}, fits(10, 512), 11)
    assert trial.prediction is not None
    older = replace(trial, prediction=replace(trial.prediction, peak_reserved_bytes=None))
    assert group(prediction_errors.groups([trial, older]), "all")["errors"]["peak_reserved_bytes"]["count"] == 1
    assert "peak_reserved_bytes" not in group(prediction_errors.groups([older]), "all")["errors"]


def test_predictions_of_another_version_are_not_compared() -> None:
    trial = predicted({}, fits(10, 512), 11)
    assert trial.prediction is not None
    older, by_formula = replace(trial.prediction, work=OLDER), replace(trial.prediction, work=None, memory_error=0.5)
    found = prediction_errors.groups([trial, replace(trial, prediction=older), replace(trial, prediction=by_formula)])
    assert group(found, "all")["fit"]["judged"] == 2


def test_fit_misjudged_both_ways() -> None:
    limit, host = 24 * GIB, OutOfMemory(reason="the host is out of memory", host=True)
    result = prediction_errors.groups(
        [
            predicted({"micro_batch": 1}, fits(20, 512), 24, limit=limit),
            predicted({"micro_batch": 2}, fits(23, 512), 24.5, limit=limit),
            predicted({"micro_batch": 4}, out_of_memory(), 23, limit=limit),
            predicted({"micro_batch": 4}, out_of_memory(), 30, limit=limit),
            predicted({"micro_batch": 4}, host, 20, limit=limit),
        ]
    )
    assert group(result, "all")["fit"] == {"judged": 4, "too_hopeful": 1, "too_careful": 1, "misjudged": 2}
    of_four = {"judged": 2, "too_hopeful": 1, "too_careful": 0, "misjudged": 1}
    assert group(result, "micro_batch=4")["fit"] == of_four
    assert group(result, "micro_batch=4")["errors"] == {}


def test_groups_stand_in_the_techniques_order() -> None:
    other = make_job(hardware=replace(HARDWARE, name="a100-80g"))
    trial = predicted({"method": "lora", "rank": 16}, fits(10, 512), 10)
    trials = [
        trial,
        predicted({"method": "lora", "rank": 8, "micro_batch": 16}, fits(10, 512), 10),
        predicted({"method": "full", "micro_batch": 2}, fits(10, 512), 10),
        replace(trial, hardware=other.hardware),
        replace(trial, config=trial.config.replace(fabric="wool")),
    ]
    names = [(one["hardware"], one["technique"]) for one in prediction_errors.groups(trials)]
    assert len(names) == len(set(names))
    assert [name for hardware, name in names if hardware == "a100-80g"][:2] == ["all", "method=lora"]
    here = [name for hardware, name in names if hardware == HARDWARE.name]
    assert here[:5] == ["all", "method=lora", "method=full", "rank=8", "rank=16"]
    assert [name for name in here if name.startswith("micro_batch")] == [
        "micro_batch=1",
        "micro_batch=2",
        "micro_batch=16",
    ]
    assert here[-1] == "fabric=wool", "an axis that is not known here stands last"
