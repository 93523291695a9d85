"""Devices that do not exist: recorded tables as they would be where techniques are slow or heavy, or time is noisy.

A search on one is told the predictions of the honest device: that they are wrong is the point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autofit.errors import UsageError, unknown
from autofit.lattice import Config, Value
from autofit.outcome import Fits, Trial
from autofit.search.budget import TIMING_SECONDS
from autofit.search.replay.oracle import Oracle
from autofit.search.replay.recorded import Recorded, under
from autofit.search.replay.timeline import heavier, slower
from autofit.search.replay.trace import Run
from autofit.techniques import AXES

RECORDED = "recorded"
"""The name of the device that a table was recorded on, which differs in nothing."""
HOW = (
    "write axis=value:FACTOR, axis=value+axis=value:FACTOR, memory:FACTOR, noise:DEVIATION, drift:N (trials) or "
    "drift:Ns (seconds), several with commas between them, or recorded"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """What takes longer: the steps of the configs that have all of these values."""

    values: tuple[tuple[str, Value], ...]
    """Each with its axis."""
    factor: float
    """How many times as long."""

    def holds(self, config: Config) -> bool:
        """Whether a config is slow."""
        return all(config.get(axis) == value for axis, value in self.values)

    def __str__(self) -> str:
        return f"{'+'.join(f'{axis}={value}' for axis, value in self.values)}:{self.factor:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A device that slows down steadily during a search, until its steps take twice as long; one of the two is set."""

    trials: int | None = None
    """The number of trials by which it does."""
    seconds: float | None = None
    """The same in seconds of trials."""

    def factor(self, before: Sequence[Run]) -> float:
        """How many times as long a step takes after these trials."""
        if self.trials is not None:
            share = len(before) / self.trials
        else:
            assert self.seconds is not None
            share = math.fsum(run.seconds for run in before) / self.seconds
        return 1.0 + min(1.0, share)

    def __str__(self) -> str:
        return f"drift:{self.trials}" if self.trials is not None else f"drift:{self.seconds:g}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeDevice:
    """How a device differs from the one that a table was recorded on. `of` is the inverse of `str`."""

    slow: tuple[Slow, ...] = ()
    memory: float = 1.0
    """Times as much memory as recorded."""
    noise: float = 0.0
    """Standard deviation of the logarithm of speed between executions; no trial shows it by itself."""
    drift: Drift | None = None

    @classmethod
    def of(cls, text: str) -> MadeDevice:
        """The device of this name. Raises `UsageError` for one that is not understood."""
        made = cls()
        for term in () if text == RECORDED else text.split(","):
            what, _, amount = term.partition(":")
            try:
                made = _with(made, what, amount)
            except ValueError as error:
                raise UsageError(f"made device {term!r} is not understood: {HOW}") from error
        return made

    def __str__(self) -> str:
        terms = [
            *map(str, self.slow),
            *([f"memory:{self.memory:g}"] if self.memory != 1.0 else []),
            *([f"noise:{self.noise:g}"] if self.noise else []),
            *([str(self.drift)] if self.drift else []),
        ]
        return ",".join(terms) or RECORDED

    def factor(self, config: Config) -> float:
        """How many times as long a config's steps take."""
        return math.prod(slow.factor for slow in self.slow if slow.holds(config))

    def trial(self, trial: Trial) -> Trial:
        """A recorded trial as it is on this device, before it drifts and without its noise: seconds included, under the
        limit that it has."""
        made = heavier(slower(trial, self.factor(trial.config), TIMING_SECONDS), self.memory)
        return replace(made, outcome=under(made.memory_limit_bytes, made.outcome))

    def recorded(self, recorded: Recorded) -> Recorded:
        """The table of this device.

        Where it takes less memory than recorded, the limit is as much lower: whether what ran out would fit is unknown.
        """
        limit = round(min(1.0, self.memory) * recorded.problem.memory_limit_bytes)
        return Recorded(
            problem=replace(recorded.problem, memory_limit_bytes=limit),
            trials={c: self.trial(replace(t, memory_limit_bytes=limit)) for c, t in recorded.trials.items()},
        )

    def differs(self, recorded: Recorded) -> bool:
        """Whether it changes what is the better of a problem's configs: something fits, not all is equally slow."""
        fitting = [c for c, trial in self.recorded(recorded).trials.items() if isinstance(trial.outcome, Fits)]
        return bool(fitting) and (not self.slow or len({self.factor(c) for c in fitting}) > 1)

    def oracle(self, made: Recorded, seed: int) -> Oracle:
        """Answers a search on this device; `made` is its own table."""

        def changing(trial: Trial, before: Sequence[Run]) -> Trial:
            return trial if self.drift is None else slower(trial, self.drift.factor(before), TIMING_SECONDS)

        return Oracle(made, seed, between=self.noise, changing=changing)


def _with(made: MadeDevice, what: str, amount: str) -> MadeDevice:
    """`made` with one more term; raises `ValueError` for an amount that is none."""
    if not float(amount.removesuffix("s") if what == "drift" else amount) > 0:
        raise ValueError(amount)
    if what == "drift":
        is_time = amount.endswith("s")
        drift = Drift(seconds=float(amount[:-1])) if is_time else Drift(trials=int(amount))
        return replace(made, drift=drift)
    if what == "memory":
        return replace(made, memory=float(amount))
    if what == "noise":
        return replace(made, noise=float(amount))
    values = tuple(_value(pair) for pair in what.split("+"))
    return replace(made, slow=(*made.slow, Slow(values=values, factor=float(amount))))


def _value(pair: str) -> tuple[str, Value]:
    name, _, text = pair.partition("=")
    axis = next((axis for axis in AXES if axis.name == name), None)
    if axis is None:
        raise unknown("axis", name, [axis.name for axis in AXES])
    return name, axis.parse(text)
