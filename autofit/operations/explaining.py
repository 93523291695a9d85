"""Why one config needs more or less memory than another: the difference part by part, and change by change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autofit.core.document import Document
from autofit.core.errors import UsageError
from autofit.core.lattice import Config
from autofit.core.units import format_bytes
from autofit.estimate.estimate import Estimate
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.calibration import why_not
from autofit.prediction.estimation import Estimation, calibrated
from autofit.techniques import AXES, Job

MOVES = (("method", "rank", "targets"), ("precision",), ("sharding", "offload"))
"""Groups of axes that change together; every other axis is a change by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Document):
    """One change on the way from the first config to the second; the changes are made one after another."""

    change: dict[str, Any] = field(hash=False)
    """The axes that change, with their new values; None for an axis that no longer applies."""
    saved_bytes: int
    """Device memory saved; negative if the change needs more."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Two configs of one workload compared, per device."""

    before: Estimate
    after: Estimate
    steps: tuple[Step, ...]
    """Their `saved_bytes` add up to the whole difference, with the opposite sign."""

    @property
    def difference_bytes(self) -> int:
        """Difference in device memory; positive if the second config needs more."""
        return self.after.device_bytes - self.before.device_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "difference_bytes": self.difference_bytes,
            "parts": {
                name: {"before": size, "after": (then := self.after.breakdown[name]), "difference": then - size}
                for name, size in self.before.breakdown.items()
            },
            "steps": [step.to_json() for step in self.steps],
        }


class Comparison:
    """Compares the memory that configs of one workload take on each device.

    A config with `sharding=none` is estimated on one device, with as many sequences as each of several would get.
    """

    def __init__(
        self, options: WorkloadOptions, *, hardware: str = "auto", memory_limit_bytes: int | None = None
    ) -> None:
        """For a catalog card or this machine's device; nothing is traced yet."""
        self._calibration, self._limit = calibrated(options, hardware, memory_limit_bytes, None)
        self._estimates: dict[Config, Estimate] = {}

    def explanation(self, before: Config, after: Config) -> Explanation:
        """Raises `UsageError` for a config that cannot be estimated, saying why."""
        return Explanation(
            before=self.estimate(before), after=self.estimate(after), steps=tuple(self.steps(before, after))
        )

    def estimate(self, config: Config) -> Estimate:
        """Raises `UsageError` for a config that cannot be estimated, saying why."""
        if config not in self._estimates:
            if (reason := self.refused(config)) is not None:
                raise UsageError(reason)
            calibration = replace(self._calibration, job=self._job_of(config))
            estimation = Estimation(calibration=calibration, config=config, memory_limit_bytes=self._limit)
            self._estimates[config] = estimation.estimate()
        return self._estimates[config]

    def refused(self, config: Config) -> str | None:
        """Why a config cannot be estimated; None if it can."""
        return why_not(config, self._job_of(config))

    def steps(self, before: Config, after: Config) -> Iterator[Step]:
        """The changes one after another; one that cannot stand alone is made together with the next."""
        last, waiting = before, before
        together = {name: group for group in MOVES for name in group}
        for axes in dict.fromkeys(together.get(axis.name, (axis.name,)) for axis in AXES):
            changed = _with(waiting, after, axes)
            if changed != waiting and self.refused(changed) is None:
                yield self._step(last, changed)
                last = changed
            waiting = changed

    def _step(self, last: Config, now: Config) -> Step:
        before, after = self.estimate(last), self.estimate(now)
        change = {a.name: a.of(now) for a in AXES if a.of(last) != a.of(now)}
        reasons = (*_differences(before, after), *_phase(before, after))
        return Step(change=change, saved_bytes=before.device_bytes - after.device_bytes, reasons=reasons)

    def _job_of(self, config: Config) -> Job:
        """The job or, if nothing is sharded, the same on one device, with as many sequences as each of several has."""
        job = self._calibration.job
        if config["sharding"] != "none" or job.workload.devices == 1:
            return job
        alone = replace(job.workload, devices=1, global_batch=job.workload.batch_per_device)
        return replace(job, workload=alone)


def _with(config: Config, other: Config, axes: Sequence[str]) -> Config:
    values = {name: value for name, value in config.to_json().items() if name not in axes}
    return Config.of({**values, **{name: other[name] for name in axes if name in other}})


def _differences(before: Estimate, after: Estimate) -> list[str]:
    """A sentence on the parts that differ by 0.5 % of the larger config's memory or more, the largest first."""
    least = 0.005 * max(before.device_bytes, after.device_bytes)
    changes = {name: after.breakdown[name] - size for name, size in before.breakdown.items()}
    listed = ", ".join(
        f"{name.replace('_', ' ')} {'+' if size > 0 else '-'}{format_bytes(abs(size))}"
        for name, size in sorted(changes.items(), key=lambda change: -abs(change[1]))
        if abs(size) >= least
    )
    return [f"at the peak: {listed}"] if listed else []


def _phase(before: Estimate, after: Estimate) -> list[str]:
    """A sentence on a peak that has moved to another phase: what the old phase saves does not count in full then."""
    if before.peak_phase == after.peak_phase:
        return []
    phase = before.peak_phase
    saved = before.phase_peaks[phase] - after.phase_peaks[phase]
    needs = f"{format_bytes(abs(saved))} {'less' if saved >= 0 else 'more'}"
    return [f"the peak moves from {phase} to {after.peak_phase}: {phase} alone needs {needs}"]
