"""Trials on other hardware tell a search what to expect, as long as there are none on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from unit.operations.made_trials import HARDWARE, OLDER, WORK, fits, make_job, make_trial

from autofit.estimate.speed import prior, seconds
from autofit.hardware import Hardware
from autofit.operations.other_hardware import learned_elsewhere
from autofit.outcome import Prediction, Trial
from autofit.search.foresight import Foresight
from autofit.techniques import complete
from autofit.units import GIB

OTHER = replace(HARDWARE, name="a100-80g", device_name="NVIDIA A100-SXM4-80GB", capability="8.0", peak_flops=312e12)
PROCESSOR = Hardware(name="cpu-of-tests", kind="cpu", device_name="Some CPU", memory_bytes=32 * GIB, cores=4)
SAID = Prediction(
    peak_allocated_bytes=1, device_bytes=10 * GIB, step_seconds=1.0, calibrated_on=0, relative_error=0.5, work=WORK
)


def trials(
    hardware: Hardware, off: Callable[[str], float] = lambda checkpointing: 1.7, said: Prediction = SAID
) -> list[Trial]:
    """Several on a device that is so many times as slow as its data sheet."""
    guess = prior(hardware)
    assert guess is not None
    found = []
    for checkpointing in ("full", "every-2", "every-4", "none"):
        for micro_batch in (1, 2, 4):
            times = off(checkpointing) * seconds(WORK, guess)
            values: dict[str, object] = {"method": "lora", "checkpointing": checkpointing, "micro_batch": micro_batch}
            trial = make_trial(values, fits(10.5, 512 / times), job=make_job(hardware=hardware))
            found.append(replace(trial, prediction=said))
    return found


def here(calibrated_on: int = 0) -> Foresight:
    said = replace(SAID, calibrated_on=calibrated_on)
    return Foresight(predictions={complete({"method": "lora"}): said})


def test_other_hardware_tells_how_far_predictions_err() -> None:
    found = learned_elsewhere(here(), HARDWARE, trials(OTHER), memory=True)
    assert found.effects_factor < 0.8
    assert 0.0 < found.memory_error.intercept < 0.03
    assert found.memory_error.spread < here().memory_error.spread
    assert found.predictions == here().predictions
    wrong = trials(OTHER, {"full": 0.3, "every-2": 3.0, "every-4": 0.5, "none": 1.0}.__getitem__)
    assert found.effects_factor < learned_elsewhere(here(), HARDWARE, wrong, memory=True).effects_factor <= 1.0


@pytest.mark.parametrize("told", [[], trials(HARDWARE), trials(PROCESSOR)], ids=["none", "its-own", "of-another-kind"])
def test_what_is_no_other_hardware_of_its_kind_tells_nothing(told: list[Trial]) -> None:
    assert learned_elsewhere(here(), HARDWARE, told, memory=True) == here()


def test_trials_on_the_hardware_itself_take_precedence() -> None:
    measured = here(calibrated_on=3)
    found = learned_elsewhere(measured, HARDWARE, trials(OTHER), memory=True)
    assert found.effects_factor == 1.0 and found.memory_error != measured.memory_error
    found = learned_elsewhere(here(), HARDWARE, trials(OTHER), memory=False)
    assert found.effects_factor < 1.0 and found.memory_error == here().memory_error
    assert learned_elsewhere(measured, HARDWARE, trials(OTHER), memory=False) == measured


def test_what_an_older_estimator_said_and_unknown_devices_tell_nothing_of_time() -> None:
    older = replace(SAID, work=OLDER)
    assert learned_elsewhere(here(), HARDWARE, trials(OTHER, said=older), memory=False).effects_factor == 1.0
    nameless = [replace(t, hardware=replace(OTHER, name="some-card")) for t in trials(OTHER)]
    assert learned_elsewhere(here(), HARDWARE, nameless, memory=False).effects_factor == 1.0
