"""What a search learns from trials on other hardware as long as there are none on its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autofit.hardware import Hardware
from autofit.operations.calibration import latest_of_each
from autofit.outcome import Trial

if TYPE_CHECKING:
    # Imported where it is used: NumPy takes a tenth of a second.
    from autofit.search.elsewhere import Miss
    from autofit.search.foresight import Foresight


def is_calibrated(foresight: Foresight) -> bool:
    """Whether trials on the hardware have shown how fast it is."""
    return any(prediction.calibrated_on for prediction in foresight.predictions.values())


def learned_elsewhere(
    foresight: Foresight, hardware: Hardware, newest_first: Iterable[Trial], *, memory: bool
) -> Foresight:
    """`foresight` with the errors that predictions had on other hardware of the same kind: those on GPUs say nothing
    about CPUs.

    Errors in time are used unless trials on this hardware have calibrated it; errors in memory only if `memory` is set.
    """
    from autofit.search.elsewhere import effects_factor, memory_error_by
    from autofit.search.surrogate import TIME

    groups = _by_hardware(
        trial for trial in newest_first if trial.hardware.kind == hardware.kind and trial.hardware.key != hardware.key
    )
    if not groups:
        return foresight
    if not is_calibrated(foresight):
        factor = min(1.0, effects_factor(map(_time_misses, groups), TIME))
        foresight = replace(foresight, effects_factor=factor)
    return replace(foresight, memory_error=memory_error_by(groups)) if memory else foresight


def _by_hardware(trials: Iterable[Trial]) -> list[list[Trial]]:
    """The trials grouped by hardware, in the order given."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.hardware.key, []).append(trial)
    return list(found.values())


def _time_misses(newest_first: Sequence[Trial]) -> list[Miss]:
    """How far each config's measured time is from what the hardware's data sheet alone predicts, which is all that is
    known of a device without trials; none where other cards stand in for it, whose error is another one."""
    from autofit.estimate.speed import prior, seconds
    from autofit.search.elsewhere import Miss

    guess = prior(newest_first[0].hardware)
    if guess is None or guess.stand_in is not None:
        return []
    return [
        Miss(config=config, workload_key=workload_key, logarithm=math.log(taken / seconds(work, guess)))
        for (workload_key, config), (work, taken) in latest_of_each(newest_first).items()
    ]
