"""A prediction as a value: a config's memory and speed, and the changes that help.

An estimator makes it and a store keeps it. `under` a limit, `timed` at a device's rates and `judged` by trials, it is
what a user sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from autofit.core.document import Document, read
from autofit.core.lattice import Config, Value
from autofit.core.prediction import Prediction, StepWork
from autofit.core.workload import Effect
from autofit.estimate.memory.deviation import UNKNOWN, MemoryDeviation
from autofit.techniques.axes.optimizer import kind_of

if TYPE_CHECKING:
    from autofit.estimate.time.roofline import Rates
    from autofit.techniques import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Document):
    """The predicted memory and time of one config on one kind of hardware."""

    config: Config
    hardware: str
    memory_limit_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    """What the driver would show: reserved memory and the context."""
    host_bytes: int
    """Host memory that one rank's training takes, without what its process holds before it trains: Python, the
    libraries and the context's part on the host (`Measurement.host_baseline_bytes`)."""
    breakdown: dict[str, int] = field(hash=False)
    """Bytes by what they hold at the moment of the peak; they add up to `device_bytes`."""
    phase_peaks: dict[str, int] = field(hash=False)
    seconds_to_estimate: float
    work: StepWork | None = None
    """What the time is computed from; None where the step was not traced, or nothing is known of the hardware."""
    step_seconds: float | None = None
    """Time of one optimizer step over the global batch; None where it was not asked for, or the work is unknown."""
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
    memory_error: float = 0.0
    """Relative error of memory by formula, for which the limit must leave room; 0 for a trace, whose error is
    `memory_deviation`."""
    memory_deviation: MemoryDeviation | None = None
    """How far trials on this hardware were from their predictions; None where nobody asked (`judged`)."""
    assumptions: tuple[str, ...] = ()
    """What no trace can show, one sentence each."""
    advice: tuple[Change, ...] = ()
    """Changes that make it fit or, if it is likely to, faster; empty where none helps, or none was asked for."""
    lightest: Lightest | None = None
    """Set where nothing near the config would fit either: the config that would need least."""
    devices: int = 1
    """Data-parallel ranks: device memory is that of each, speed that of all together."""
    ranks_per_host: int = 1
    """Ranks taken to share one host's memory (`techniques.job.ranks_per_host`)."""
    host_memory_bytes: int | None = None
    """Memory of one host; None where it is unknown, as for a card of the catalog."""
    copied_bytes: int = 0
    """Host memory that copies take while a checkpoint is saved (`estimate.saving.copied_bytes`)."""
    gives_back_cache: bool = False
    """Whether it fits only because CUDA's allocator gives unused memory back before it fails: `device_bytes` then holds
    for this limit alone, and steps are slower than predicted."""
    borrowed_error: float = 0.0
    """By what share `device_bytes` may be too low, as its fragmentation is that of another config of the lattice; 0
    where the allocator was replayed for this one."""
    uncompiled: bool = False
    """Whether a config that compiles is predicted as without, because its compiled layers cannot be traced."""

    @property
    def fits(self) -> bool:
        """Whether both the device's and the host's memory are enough."""
        return self.fits_device and not self.host_short_bytes

    @property
    def likely_fits(self) -> bool:
        """Whether it fits with room for as much as predictions are off (`certainty`), where that was asked."""
        return self.fits and self.certainty != "unsure"

    @property
    def fits_device(self) -> bool:
        """Whether it stays within the limit even if its memory is off by `memory_error`."""
        return self.device_bytes * (1.0 + self.memory_error) <= self.memory_limit_bytes

    @property
    def certainty(self) -> str | None:
        """How sure `fits` is: `sure`, `likely` or `unsure`. None where nobody asked (`judged`), and where the host's
        memory is too small: no trial was compared with what is predicted of that."""
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
    def peak_phase(self) -> str:
        """The phase in which most is allocated, of `phase_peaks`."""
        return max(self.phase_peaks, key=lambda phase: self.phase_peaks[phase])

    @property
    def headroom_bytes(self) -> int:
        """What the limit leaves free; negative where it is exceeded."""
        return self.memory_limit_bytes - self.device_bytes

    @property
    def prediction(self) -> Prediction:
        """The part of it that a trial stores."""
        return Prediction(**self._named(*(field.name for field in fields(Prediction))))

    def under(self, memory_limit_bytes: int, context_bytes: int | None = None) -> Estimate | None:
        """This estimate under another limit and with another CUDA context, if that is given. None if it must be
        recomputed: these decide what CUDA's allocator keeps or pages out, or borrowed fragmentation decides what fits.
        """
        more = 0 if context_bytes is None else context_bytes - self.breakdown["context"]
        if more and kind_of(self.config).paged:
            return None
        if memory_limit_bytes == self.memory_limit_bytes and not more:
            return self
        cache = self.breakdown["fragmentation"] if self.breakdown["context"] else 0
        device = self.device_bytes + more
        if self.gives_back_cache or device - cache <= memory_limit_bytes < device * (1.0 + self.borrowed_error):
            return None
        parts = {**self.breakdown, "context": self.breakdown["context"] + more}
        return replace(self, memory_limit_bytes=memory_limit_bytes, device_bytes=device, breakdown=parts)

    def timed(self, job: Job, rates: Rates | None) -> Estimate:
        """This estimate on the job's hosts, with the time that its work takes at `rates`; without a time if None."""
        from autofit.estimate.assumptions import COMPILE_ERROR, assumptions, of_borrowed
        from autofit.estimate.saving import copied_bytes
        from autofit.estimate.time.roofline import micro_step_seconds, seconds, waits_for_launches
        from autofit.techniques.job import ranks_per_host
        from autofit.training.flops import mfu

        assumed = self.assumptions
        if not self.memory_error:  # anew, as a stored estimate may be of other hosts; one by formula is not stored
            borrowed = (of_borrowed(self.borrowed_error),) if self.borrowed_error else ()
            assumed = (*assumptions(self.config, job, uncompiled=self.uncompiled), *borrowed)
        here = replace(
            self,
            devices=job.workload.devices,
            ranks_per_host=ranks_per_host(job),
            host_memory_bytes=job.hardware.host_memory_bytes or None,
            copied_bytes=copied_bytes(self.config, job),
            assumptions=assumed,
        )
        if rates is None or self.work is None:
            unknown: dict[str, Any] = dict.fromkeys(_TIME)
            return replace(here, **unknown, calibrated_on=0)
        step_seconds = seconds(self.work, rates)
        speed = job.workload.tokens_per_step / step_seconds
        accumulation = job.workload.batch_per_device // self.config.number("micro_batch")
        return replace(
            here,
            step_seconds=step_seconds,
            micro_step_seconds=micro_step_seconds(self.work, rates, accumulation),
            tokens_per_second=speed,
            mfu=mfu(job, self.config, speed),
            calibrated_on=rates.calibrated_on,
            relative_error=rates.error_of(self.work) + (COMPILE_ERROR if self.config["compile"] is True else 0.0),
            waits_for_launches=waits_for_launches(self.work, rates),
            stand_in=None if rates.calibrated_on else rates.stand_in,
        )

    def judged(self, deviations: Mapping[str, MemoryDeviation], context_error: int = 0) -> Estimate:
        """This estimate with how far its memory may be off; `deviations` are what trials show for each method, and
        `context_error` is by how many bytes the context may be off.

        What they show about traces says nothing about a formula. Without trials, what is offloaded was not compared
        with a real card, and a context that is a guess may be off besides.
        """
        deviation = deviations[self.config.text("method")]
        if self.memory_error:
            deviation = MemoryDeviation(mean=0.0, deviation=math.log1p(self.memory_error), compared_on=0)
        elif not deviation.compared_on:
            least = UNKNOWN if self.config["offload"] != "none" else 0.0
            besides = context_error / self.device_bytes
            deviation = replace(deviation, deviation=math.hypot(max(deviation.deviation, least), besides))
        return replace(self, memory_deviation=deviation)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; with several devices it also has `tokens_per_second_per_device`."""
        data = {"provenance": "predicted", **self._named(*_DERIVED), **Document.to_json(self)}
        del data["ranks_per_host"], data["copied_bytes"]
        if self.devices > 1:
            speed = self.tokens_per_second
            data["tokens_per_second_per_device"] = None if speed is None else speed / self.devices
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Estimate:
        """The inverse of `to_json`, without the advice, the hosts (`timed`) and what trials have shown (`judged`);
        other keys are ignored. Raises `ValueError` for work as an earlier version counted it."""
        estimate = read(cls, {f.name: data[f.name] for f in fields(cls) if f.name not in _SET_LATER})
        if estimate.work is None and data["work"] is not None:
            raise ValueError("its work was counted by an earlier version")
        return estimate

    def short_json(self) -> dict[str, Any]:
        """Its main figures as a JSON object, for an estimate that is part of another."""
        return {"config": self.config.to_json(), **self._named(*_SHORT)}

    def _named(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


_TIME = (
    *("step_seconds", "micro_step_seconds", "tokens_per_second", "mfu"),
    *("relative_error", "waits_for_launches", "stand_in"),
)
_SET_LATER = (
    *("devices", "ranks_per_host", "host_memory_bytes", "copied_bytes"),
    *("memory_deviation", "advice", "lightest"),
)
_DERIVED = ("fits", "certainty", "machine_host_bytes", "saving_host_bytes", "headroom_bytes")
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
