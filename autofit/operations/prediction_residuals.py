"""How far predictions were from measurements: the errors of all trials that have both."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autofit.core.document import Document
from autofit.core.errors import EnvironmentLacks, UsageError
from autofit.core.lattice import Config, Value
from autofit.core.outcome import Fits, Measurement, Trial
from autofit.core.prediction import Prediction
from autofit.estimate.version import is_current
from autofit.store import Store, read_lines
from autofit.techniques import AXES

LATEST = 200
"""How many of the latest predicted trials `prediction_errors` are the medians of."""
EVERYTHING = "all"
"""The group of all trials on one hardware."""
QUANTITIES: dict[str, Callable[[Prediction, Measurement], tuple[float | None, float]]] = {
    "peak_allocated_bytes": lambda predicted, m: (predicted.peak_allocated_bytes, m.peak_allocated_bytes),
    "peak_reserved_bytes": lambda predicted, m: (predicted.peak_reserved_bytes, m.peak_reserved_bytes),
    "device_bytes": lambda predicted, m: (predicted.device_bytes, m.device_bytes),
    "step_seconds": lambda predicted, m: (
        predicted.step_seconds if predicted.calibrated_on else None,
        m.step_seconds.median,
    ),
    "step_seconds_uncalibrated": lambda predicted, m: (
        None if predicted.calibrated_on else predicted.step_seconds,
        m.step_seconds.median,
    ),
}
"""What is compared: the predicted value (None if there is none) and the measured one. Times calibrated on measured
trials are kept apart from guesses based on data sheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Relative errors: predicted over measured, minus one. Positive errors are overestimates."""

    count: int
    median: float
    median_absolute: float
    p95_absolute: float
    """By the nearest-rank method: at least 95 % of the errors are no larger."""
    worst: float
    """The error farthest from zero, with its sign."""

    @classmethod
    def of(cls, errors: Sequence[float]) -> Distribution:
        """The distribution of at least one error."""
        sizes = sorted(abs(error) for error in errors)
        return cls(
            count=len(errors),
            median=statistics.median(errors),
            median_absolute=statistics.median(sizes),
            p95_absolute=sizes[math.ceil(0.95 * len(sizes)) - 1],
            worst=max(errors, key=abs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How often the prediction was right about whether a config fits its trial's limit."""

    judged: int
    """Trials that trained or ran out of the device's memory."""
    too_hopeful: int
    """Of these, those that were predicted to fit and ran out of memory."""
    too_careful: int
    """Of these, those that were predicted not to fit and trained."""

    @property
    def misjudged(self) -> int:
        """Of these, those that were predicted wrongly either way."""
        return self.too_hopeful + self.too_careful


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The errors of the trials on one hardware whose configs share the value of a technique."""

    hardware: str
    technique: str
    """`axis=value` (the method is such an axis), or `all`."""
    errors: Mapping[str, Distribution]
    """By name in `QUANTITIES`; quantities that no trial has both predicted and measured are absent."""
    fit: Judgement

    @classmethod
    def of(cls, hardware: str, technique: str, pairs: Sequence[tuple[Prediction, Trial]]) -> Group:
        """The group of these trials, each with its prediction."""
        fits = [
            (prediction.fits(trial.memory_limit_bytes), isinstance(trial.outcome, Fits)) for prediction, trial in pairs
        ]
        errors = {name: list(_errors(name, pairs)) for name in QUANTITIES}
        return cls(
            hardware=hardware,
            technique=technique,
            errors={name: Distribution.of(values) for name, values in errors.items() if values},
            fit=Judgement(
                judged=len(pairs), too_hopeful=fits.count((True, False)), too_careful=fits.count((False, True))
            ),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"fit": {**asdict(self.fit), "misjudged": self.fit.misjudged}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals(Document):
    """The errors of every group: for each hardware, all its trials, each method, and each value of each technique."""

    trials: int
    """Trials that were predicted by this version of the estimator and either trained or ran out of the device's memory.
    """
    groups: tuple[Group, ...]


def residuals(store: str | None = None, *, tables: Sequence[Path] = ()) -> Residuals:
    """The errors of all predictions in the store at this URL or, with `tables`, in files from `autofit db export`.

    Every attempt that this version of the estimator predicted counts. Raises `UsageError` for a file that cannot be
    read, and `EnvironmentLacks` if there is none.
    """
    if tables:
        errors = judged(trial for table in tables for trial in _read(table))
        where = ", ".join(map(str, tables))
    else:
        with Store.open(store, create=False) as opened:
            errors = judged(opened.predicted())
            where = f"the store {opened}"
    if not errors.trials:
        raise EnvironmentLacks(
            f"{where} holds no trial with a prediction of this version of the estimator and an outcome",
            remedy="run `autofit search`, which stores a prediction with every trial",
        )
    return errors


def judged(trials: Iterable[Trial]) -> Residuals:
    """The errors of those trials that were predicted by this version of the estimator and either trained or ran out of
    the device's memory."""
    groups: dict[tuple[str, str, Value], list[tuple[Prediction, Trial]]] = defaultdict(list)
    count = 0
    for trial in trials:
        if trial.prediction is None or not is_current(trial.prediction):
            continue
        if trial.measurement is None and not trial.ran_out_on_device:
            continue  # the outcome does not show whether the config fits the device
        count += 1
        for axis, value in ((EVERYTHING, EVERYTHING), *trial.config.items):
            groups[trial.hardware.name, axis, value].append((trial.prediction, trial))
    return Residuals(
        trials=count,
        groups=tuple(
            Group.of(hardware, axis if axis == EVERYTHING else str(Config.of({axis: value})), pairs)
            for (hardware, axis, value), pairs in sorted(
                groups.items(), key=lambda item: (item[0][0], _place(item[0][1], item[0][2]))
            )
        ),
    )


def prediction_errors(store: Store) -> dict[str, float]:
    """Median of |measured / predicted - 1| of `memory` and of `step_seconds`, over the latest trials that fitted and
    were traced by this version of the estimator; without those of which there are none. Raises `StoreError`."""
    memory, seconds = [], []
    for trial in store.predicted(latest=LATEST):
        predicted, measured = trial.prediction, trial.measurement
        if predicted is None or measured is None or predicted.memory_error > 0 or not is_current(predicted):
            continue  # what a formula or another version of the estimator said
        memory.append(abs(measured.device_bytes / max(predicted.device_bytes, 1) - 1))
        if predicted.step_seconds:
            seconds.append(abs(measured.step_seconds.median / predicted.step_seconds - 1))
    errors = {"memory": memory, "step_seconds": seconds}
    return {figure: statistics.median(values) for figure, values in errors.items() if values}


def _errors(name: str, pairs: Iterable[tuple[Prediction, Trial]]) -> Iterator[float]:
    """The errors of one quantity in the trials that have it both predicted and measured."""
    for prediction, trial in pairs:
        if trial.measurement is not None:
            predicted, measured = QUANTITIES[name](prediction, trial.measurement)
            if predicted is not None and measured > 0:
                yield predicted / measured - 1.0


_AXES = {axis.name: (place, axis) for place, axis in enumerate(AXES)}


def _place(axis: str, value: Value) -> tuple[int, str, int, str]:
    """A group's sort key: `all` first, then axes and values in their own order, then those that are not known here."""
    if axis == EVERYTHING:
        return (-1, "", 0, "")
    if axis not in _AXES:
        return (len(_AXES), axis, 0, str(value))
    place, definition = _AXES[axis]
    return (place, axis, definition.place(value), str(value))


def _read(table: Path) -> Iterator[Trial]:
    try:
        with table.open(encoding="utf-8") as lines:
            yield from read_lines(lines)
    except UsageError as error:
        raise UsageError(f"{table}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{table} cannot be read: {error}") from error
