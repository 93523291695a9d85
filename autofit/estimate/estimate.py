"""A prediction as a value: a config's memory and speed, and the changes that help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from autofit.core.document import Document
from autofit.core.lattice import Value
from autofit.core.prediction import Prediction
from autofit.core.workload import Effect
from autofit.estimate.footprint import Footprint
from autofit.estimate.memory.deviation import UNKNOWN, MemoryDeviation

if TYPE_CHECKING:
    from autofit.estimate.time.roofline import Rates
    from autofit.techniques import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Footprint):
    """A config's footprint on a job's hosts, with its time at a device's rates and how sure trials make its memory."""

    devices: int = 1
    """Data-parallel ranks: device memory is that of each, speed that of all together."""
    ranks_per_host: int = 1
    """Ranks taken to share one host's memory (`techniques.job.ranks_per_host`)."""
    host_memory_bytes: int | None = None
    """Memory of one host; None where it is unknown, as for a card of the catalog."""
    copied_bytes: int = 0
    """Host memory that copies take while a checkpoint is saved (`estimate.saving.copied_bytes`)."""
    step_seconds: float | None = None
    """Time of one optimizer step over the global batch; None where the rates or the work are unknown, as are the other
    figures of time then."""
    micro_step_seconds: float | None = None
    """Time of one micro-step; what is left of `step_seconds` is the update."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    calibrated_on: int = 0
    """Number of measured trials that the time was fitted to; 0 for a guess."""
    relative_error: float | None = None
    """Relative error of the predicted time."""
    waits_for_launches: bool | None = None
    """Whether the host is slower than the device (`roofline.waits_for_launches`)."""
    stand_in: str | None = None
    """What a guessed time is taken from in place of the hardware's own data sheet (`Rates.stand_in`)."""
    memory_deviation: MemoryDeviation | None = None
    """How far trials on this hardware were from their predictions; None where nobody asks how sure it is."""
    assumptions: tuple[str, ...] = ()
    """What no trace can show, one sentence each."""
    advice: tuple[Change, ...] = ()
    """Changes that make it fit or, if it is likely to, faster; empty where none helps, or none was asked for."""
    lightest: Lightest | None = None
    """Set where nothing near the config would fit either: the config that would need least."""

    @classmethod
    def of(
        cls,
        footprint: Footprint,
        job: Job,
        rates: Rates | None = None,
        deviations: Mapping[str, MemoryDeviation] | None = None,
    ) -> Estimate:
        """The estimate of a footprint for this job: without a time where the rates are unknown, with `deviations` as
        trials show them for each method."""
        from autofit.estimate.assumptions import assumptions
        from autofit.estimate.saving import copied_bytes
        from autofit.techniques.job import ranks_per_host

        return cls(
            **{f.name: getattr(footprint, f.name) for f in fields(Footprint)},
            devices=job.workload.devices,
            ranks_per_host=ranks_per_host(job),
            host_memory_bytes=job.hardware.host_memory_bytes or None,
            copied_bytes=copied_bytes(footprint.config, job),
            **({} if rates is None else _time(footprint, job, rates)),
            memory_deviation=None if deviations is None else _deviation(footprint, job, deviations),
            assumptions=assumptions(footprint, job),
        )

    @property
    def fits(self) -> bool:
        """Whether both the device's and the host's memory are enough."""
        return self.fits_device and not self.host_short_bytes

    @property
    def likely_fits(self) -> bool:
        """Whether it fits with room for as much as predictions are off (`certainty`), where that was asked."""
        return self.fits and self.certainty != "unsure"

    @property
    def certainty(self) -> str | None:
        """How sure `fits` is: `sure`, `likely` or `unsure`. None where nobody asks, and where the host's memory is too
        small: no trial was compared with what is predicted of that."""
        deviation = self.memory_deviation
        if deviation is None or self.host_short_bytes:
            return None
        return deviation.certainty(self.device_bytes, self.memory_limit_bytes)

    @property
    def machine_host_bytes(self) -> int:
        """Host memory that the ranks which share one host take together."""
        return self.host_bytes * self.ranks_per_host

    @property
    def saving_host_bytes(self) -> int:
        """Host memory that they take together while a checkpoint is saved."""
        return self.machine_host_bytes + self.copied_bytes

    @property
    def host_short_bytes(self) -> int:
        """By how much the host's memory falls short in training; 0 where it is enough, or unknown."""
        return 0 if self.host_memory_bytes is None else max(0, self.machine_host_bytes - self.host_memory_bytes)

    @property
    def cannot_save(self) -> bool:
        """Whether a checkpoint, as transformers' Trainer saves it, exceeds the host's memory. It does not decide what
        fits, because others save with less."""
        return self.host_memory_bytes is not None and self.saving_host_bytes > self.host_memory_bytes

    @property
    def prediction(self) -> Prediction:
        """The part of it that a trial stores."""
        return Prediction(**self._named(*(field.name for field in fields(Prediction))))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; with several devices it also has `tokens_per_second_per_device`."""
        data = {"provenance": "predicted", **self._named(*_DERIVED), **Document.to_json(self)}
        for name in _UNSAID:
            del data[name]
        if self.devices > 1:
            speed = self.tokens_per_second
            data["tokens_per_second_per_device"] = None if speed is None else speed / self.devices
        return data

    def short_json(self) -> dict[str, Any]:
        """Its main figures as a JSON object, for an estimate that is part of another."""
        return {"config": self.config.to_json(), **self._named(*_SHORT)}

    def _named(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


def _time(footprint: Footprint, job: Job, rates: Rates) -> dict[str, Any]:
    """The figures of time of a footprint; none where its work is unknown."""
    from autofit.estimate.assumptions import COMPILE_ERROR
    from autofit.estimate.time.roofline import micro_step_seconds, seconds, waits_for_launches
    from autofit.training.flops import mfu

    config, work = footprint.config, footprint.work
    if work is None:
        return {}
    step_seconds = seconds(work, rates)
    speed = job.workload.tokens_per_step / step_seconds
    accumulation = job.workload.batch_per_device // config.number("micro_batch")
    return {
        "step_seconds": step_seconds,
        "micro_step_seconds": micro_step_seconds(work, rates, accumulation),
        "tokens_per_second": speed,
        "mfu": mfu(job, config, speed),
        "calibrated_on": rates.calibrated_on,
        "relative_error": rates.error_of(work) + (COMPILE_ERROR if config["compile"] is True else 0.0),
        "waits_for_launches": waits_for_launches(work, rates),
        "stand_in": None if rates.calibrated_on else rates.stand_in,
    }


def _deviation(footprint: Footprint, job: Job, deviations: Mapping[str, MemoryDeviation]) -> MemoryDeviation:
    """How far a footprint's memory may be off. What trials show about traces says nothing about a formula. Without
    trials, what is offloaded was not compared with a real card, and a context that is a guess may be off besides."""
    from autofit.estimate.assumptions import context_error

    deviation = deviations[footprint.config.text("method")]
    if footprint.memory_error:
        return MemoryDeviation(mean=0.0, deviation=math.log1p(footprint.memory_error), compared_on=0)
    if deviation.compared_on:
        return deviation
    least = UNKNOWN if footprint.config["offload"] != "none" else 0.0
    besides = context_error(job) / footprint.device_bytes
    return replace(deviation, deviation=math.hypot(max(deviation.deviation, least), besides))


_DERIVED = ("fits", "certainty", "machine_host_bytes", "saving_host_bytes", "headroom_bytes", "memory_error")
_UNSAID = ("ranks_per_host", "copied_bytes", "untraced")
_SHORT = (
    *("fits", "certainty", "device_bytes", "machine_host_bytes", "saving_host_bytes", "headroom_bytes"),
    *("tokens_per_second", "step_seconds", "mfu"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New values for some axes of an estimated config, and the resulting estimate."""

    values: Mapping[str, Value] = field(hash=False)
    """The axes that change, with their new values."""
    effect: Effect
    """What the change does to the training."""
    estimate: Estimate
    roles: tuple[str, ...] = ()
    """Set for changes that help: `smallest` (changes the fewest values), `fastest`, `safest` (leaves the most memory);
    `same training`: it offloads, where all others alter rounding or train something else."""

    def to_json(self) -> dict[str, Any]:
        return {
            "roles": list(self.roles),
            "change": dict(self.values),
            "effect": self.effect.label,
            "estimate": self.estimate.short_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightest:
    """The config with the lightest value of every axis, and the smallest card that would hold it."""

    estimate: Estimate
    card: str | None
    """Its name in the catalog; None where no card holds the config, and for a CPU."""

    def to_json(self) -> dict[str, Any]:
        return {"card": self.card, "estimate": self.estimate.short_json()}
