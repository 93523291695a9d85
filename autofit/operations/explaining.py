"""Why one config needs more or less memory than another: the difference part by part, and change by change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autofit.catalog.models import shape
from autofit.catalog.space import ADAPTER_AXES
from autofit.core.document import Document
from autofit.core.errors import UsageError
from autofit.core.lattice import Config
from autofit.core.units import format_bytes
from autofit.estimate.estimate import Estimate
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.estimating import setting, why_not
from autofit.techniques import AXES, Job

if TYPE_CHECKING:
    from autofit.estimate.estimator import Estimator

MOVES = (("method", "rank", "targets"), ("precision",), ("sharding", "offload"))
"""Groups of axes that change together; every other axis is a change by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Document):
    """One change on the way from the first config to the second; the changes are made one after another."""

    change: dict[str, Any] = field(hash=False)
    """The axes that change, with their new values; None for an axis that no longer applies."""
    saved_bytes: int
    """Device memory saved; negative if the change needs more."""
    expected_bytes: int | None
    """The weights, gradients and optimizer states that the change takes off each device, in this training or if every
    parameter were trained, whichever is more; None if these are not worth naming, or if memory is by formula."""
    expected_here_bytes: int | None
    """Those that it takes off in this training; never negative. The peak can shrink by more or by less."""
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


def explain(
    options: WorkloadOptions,
    before: Config,
    after: Config,
    *,
    hardware: str = "auto",
    memory_limit_bytes: int | None = None,
    store: str | None = None,
) -> Explanation:
    """Compare the memory that two configs take on each device, for a catalog card or this machine's device.

    A config with `sharding=none` is estimated on a single device, with as many sequences as each of several would get.
    Raises `UsageError` for a config that cannot be estimated, saying why.
    """
    found = Comparison(options, hardware=hardware, memory_limit_bytes=memory_limit_bytes, store=store)
    return Explanation(
        before=found.estimate(before), after=found.estimate(after), steps=tuple(found.steps(before, after))
    )


class Comparison:
    """Estimates of configs of one workload, on several devices or one, that share their traces."""

    def __init__(
        self,
        options: WorkloadOptions,
        *,
        hardware: str = "auto",
        memory_limit_bytes: int | None = None,
        store: str | None = None,
    ) -> None:
        """Arguments as for `explain`; nothing is traced yet."""
        self._job, self._limit, self._rates, self._deviations = setting(options, hardware, memory_limit_bytes, store)
        self._estimators: dict[int, Estimator] = {}

    def estimate(self, config: Config) -> Estimate:
        """Raises `UsageError` for a config that cannot be estimated, saying why."""
        reason = self.refused(config)
        if reason is not None:
            raise UsageError(reason)
        return self._estimator(config).estimate(config, memory_limit_bytes=self._limit).judged(self._deviations)

    def refused(self, config: Config) -> str | None:
        """Why a config cannot be estimated; None if it can."""
        return why_not(config, self._job_of(config))

    def steps(self, before: Config, after: Config) -> Iterator[Step]:
        """The changes one after another; one that cannot stand alone is made together with the next."""
        last, waiting = before, before
        groups = [axes for axes in _groups() if any(before.get(a) != after.get(a) for a in axes)]
        for axes in groups:
            waiting = _with(waiting, after, axes)
            if self.refused(waiting) is None:
                yield self._step(last, waiting)
                last = waiting

    def _step(self, last: Config, now: Config) -> Step:
        before, after = self.estimate(last), self.estimate(now)
        change = {a.name: now.get(a.name) for a in AXES if last.get(a.name) != now.get(a.name)}
        saved = before.device_bytes - after.device_bytes
        expected, here, reasons = self._expectation(last, now, saved)
        reasons += [*_differences(before, after), *_phase(before, after)]
        return Step(
            change=change, saved_bytes=saved, expected_bytes=expected, expected_here_bytes=here, reasons=tuple(reasons)
        )

    def _expectation(self, last: Config, now: Config, saved: int) -> tuple[int | None, int | None, list[str]]:
        """(`expected_bytes` and `expected_here_bytes` of the change, and reasons why it saves what it does)."""
        if (last["sharding"], last["offload"]) == (now["sharding"], now["offload"]):
            return None, None, []
        own = self._lasting_saving(last, now)
        whole = self._lasting_saving(_of_everything(last), _of_everything(now))
        whole = own if whole is None else whole
        if own is None or whole is None:
            return None, None, []
        if max(own, whole) < _worth_naming(self.estimate(last), self.estimate(now)):
            return None, None, []
        # The peak's difference can be more than what lasts: 16-bit copies of weights, and gradients on their way to
        # where they are summed, are not there when the update begins.
        reasons = [
            f"as the update begins, weights, gradients and optimizer states take {_less(own)}; what the peak has "
            f"beside them takes {_less(saved - own)}"
        ]
        if whole > own:
            trained = self._estimator(now).holdings(now).trained / shape(self._job.model).parameters
            reasons.append(
                f"{now['method']} trains {trained:.2%} of {self._job.model.name}: if all of it were trained, these "
                f"would take {format_bytes(whole)} less"
            )
        return max(own, whole), max(own, 0), reasons

    def _lasting_saving(self, last: Config, now: Config) -> int | None:
        """Bytes that the change takes off each device's weights, gradients and optimizer states as an update begins;
        None if either config is refused, or its memory is by formula."""
        if any(self.refused(config) is not None or self.estimate(config).memory_error for config in (last, now)):
            return None
        return self._estimator(last).lasting_bytes(last) - self._estimator(now).lasting_bytes(now)

    def _estimator(self, config: Config) -> Estimator:
        from autofit.estimate.estimator import Estimator
        from autofit.estimate.tracing.trace_cache import TraceCache

        job = self._job_of(config)
        devices = job.workload.devices
        if devices not in self._estimators:
            self._estimators[devices] = Estimator(job, self._rates, cache=TraceCache.of_user())
        return self._estimators[devices]

    def _job_of(self, config: Config) -> Job:
        """The job or, if nothing is sharded, the same on one device, with as many sequences as each of several has."""
        workload = self._job.workload
        if config["sharding"] != "none" or workload.devices == 1:
            return self._job
        alone = replace(workload, devices=1, global_batch=workload.batch_per_device)
        return replace(self._job, workload=alone)


def _less(size: int) -> str:
    return f"{format_bytes(abs(size))} {'less' if size >= 0 else 'more'}"


def _groups() -> list[tuple[str, ...]]:
    """Every axis, grouped with those that change together with it."""
    together = {name: group for group in MOVES for name in group}
    return list(dict.fromkeys(together.get(axis.name, (axis.name,)) for axis in AXES))


def _with(config: Config, other: Config, axes: Sequence[str]) -> Config:
    """`config` with the values of `other` on the given axes."""
    values = {name: value for name, value in config.to_json().items() if name not in axes}
    return Config.of({**values, **{name: other[name] for name in axes if name in other}})


def _of_everything(config: Config) -> Config:
    """`config` with every parameter trained."""
    return Config.of({**{k: v for k, v in config.items if k not in ADAPTER_AXES}, "method": "full"})


def _worth_naming(before: Estimate, after: Estimate) -> float:
    """Bytes below which a difference is not mentioned: 0.5 % of the larger config's memory."""
    return 0.005 * max(before.device_bytes, after.device_bytes)


def _differences(before: Estimate, after: Estimate) -> list[str]:
    """The parts of the breakdown that differ, largest difference first, in one sentence."""
    least = _worth_naming(before, after)
    found = [(name, after.breakdown[name] - size) for name, size in before.breakdown.items()]
    named = sorted((f for f in found if abs(f[1]) >= least), key=lambda f: -abs(f[1]))
    if not named:
        return []
    listed = ", ".join(
        f"{name.replace('_', ' ')} {'+' if size > 0 else '-'}{format_bytes(abs(size))}" for name, size in named
    )
    return [f"at the peak: {listed}"]


def _phase(before: Estimate, after: Estimate) -> list[str]:
    """A sentence on a peak that has moved to another phase: what the old phase saves does not count in full then."""
    if before.peak_phase == after.peak_phase:
        return []
    there = before.peak_phase
    saved = before.phase_peaks[there] - after.phase_peaks[there]
    return [f"the peak moves from {there} to {after.peak_phase}: {there} alone needs {_less(saved)}"]
