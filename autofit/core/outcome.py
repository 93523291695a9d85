"""Typed outcomes of a trial, each with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeGuard, get_args

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.state import DeviceState
from autofit.core.document import Document, read
from autofit.core.lattice import Config
from autofit.core.prediction import Prediction
from autofit.core.workload import Workload

DEADLINE_SECONDS = 600.0
"""A trial that has not ended by then is killed; the slowest thing it must allow for is compiling a large model."""
PHASES = ("forward", "backward", "optimizer")
"""The phases of a training step, in order."""
EVALUATION = "evaluation"
"""The phase between training steps in which sequences are only evaluated; of workloads with an `eval_batch`, and of a
user's Trainer."""
ALL_PHASES = (*PHASES, EVALUATION)
SAVING = "saving"
"""The phase in which a checkpoint is saved; of estimates, and of a user's Trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds(Document):
    """Seconds of one optimizer step of the whole global batch, composed from timed micro-steps and updates."""

    median: float
    p95: float
    relative_spread: float | None
    """Width of the median's 90 % confidence interval relative to the median, from the steps of this process alone
    (`Point.relative_spread` adds the variation between processes); None where a single repeat was timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement(Document):
    """One rank's own measurements in a group; the fields are those of `Measurement`."""

    rank: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    host_peak_bytes: int
    step_seconds: float
    """Median of the rank's own step times, including the time it waits for other ranks within a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Document):
    """What a trial that fits has measured.

    Bytes are per device, for a group the maximum over its ranks; step times are the slowest rank's; tokens per second
    are the whole group's.
    """

    tokens_per_second: float
    step_seconds: StepSeconds
    mfu: float | None
    """Model FLOP utilisation in 0..1 against the dense bf16 peak; None where the peak is not known."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    """What the driver reports: reserved plus context; on the CPU the child's own peak resident memory."""
    host_peak_bytes: int
    """Peak resident memory of the trial's process."""
    host_baseline_bytes: int
    """The part of it that was already there before the trial began: interpreter and imports."""
    phase_peaks: Mapping[str, int]
    """Peak of each phase in bytes: allocated on an accelerator, own resident memory on the CPU."""
    losses: tuple[float, ...]
    """Loss of every optimizer step that ran, warm-up included, in nats per token; with lengths those of the warm-up. Of
    a user's program those that it reported, which may be none."""
    reference_loss: float | None
    """Loss of the plain forward pass on the first step's batch, in nats per token; None where it was not taken."""
    steps: int
    """Timed repeats."""
    setup_seconds: float
    """From the request to the first timed step: building, warm-up, compilation."""
    overhead_seconds: float
    """From the request to the first forward pass, without building the step: what the trial's machinery costs."""
    gradient_norms: tuple[float | None, ...] = ()
    """L2 norm of all gradients before clipping, one per optimizer step that ran, warm-up included; None where it was
    not finite, as loss scaling makes it on purpose to find its scale."""
    plain_gradient_norm: float | None = None
    """L2 norm of plain training's gradient after the timed steps, with which the step's own agrees; None where they
    were not compared."""
    setup_peak_bytes: int = 0
    """Peak while the step was built and checked, before the first training step: not included in the peaks above."""
    leak_bytes_per_step: int = 0
    """Memory left behind by each timed step; 0 where it did not grow steadily, or there were too few steps to tell."""
    expandable_segments: bool = False
    """Whether the allocator's expandable segments were on."""
    stopped_early: bool = False
    """Whether timing stopped after the first repeats, because a measured config beats this one beyond doubt."""
    ranks: tuple[RankMeasurement, ...] = ()
    """Each rank's own figures, in order; empty for a process that trained alone."""

    def slowed(self, factor: float) -> Measurement:
        """The same, had its steps taken `factor` times as long."""
        steps = self.step_seconds
        return replace(
            self,
            tokens_per_second=self.tokens_per_second / factor,
            step_seconds=replace(steps, median=factor * steps.median, p95=factor * steps.p95),
            mfu=None if self.mfu is None else self.mfu / factor,
        )

    def to_json(self) -> dict[str, Any]:
        """`loss` summarises `losses`, null where there are none."""
        loss = {"first": self.losses[0], "last": self.losses[-1]} if self.losses else None
        return {**Document.to_json(self), "loss": loss}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        return read(cls, {name: value for name, value in data.items() if name != "loss"})


class Ending(Document):
    """How a trial may end."""

    __slots__ = ()
    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """`{"outcome": kind, "measurement": ...}` or `{"outcome": kind, "reason": ..., evidence}`."""
        return {"outcome": self.kind, **Document.to_json(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits(Ending):
    """The config trained within the limit."""

    kind: ClassVar[str] = "fits"
    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(Ending):
    """An allocation failed, or the kernel killed the trial for its memory."""

    kind: ClassVar[str] = "out_of_memory"
    reason: str
    phase: str | None = None
    """`build`, `forward`, `backward` or `optimizer`: where it failed."""
    requested_bytes: int | None = None
    """The request that failed, where the allocator names it."""
    signal: str | None = None
    """The signal that ended the trial, if the kernel killed it."""
    host: bool = False
    """Whether host memory ran out rather than the accelerator's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut(Ending):
    """The trial did not end within its deadline and was killed."""

    kind: ClassVar[str] = "timed_out"
    reason: str
    deadline_seconds: float
    phase: str | None = None
    phases_entered: int = 0
    """Phases that had begun by then. In a group, the ranks with the fewest hang, and the others wait for them."""
    least_step_seconds: float | None = None
    """Lower bound on the seconds of one optimizer step of the whole global batch, from the micro-steps that the trial
    began; None where it ended before the first one."""
    is_proven: bool = False
    """Whether a micro-step after the first has shown that bound: the first may also generate kernels for minutes."""
    peak_bytes: int | None = None
    """The highest of the phases' peaks by then (`Measurement.phase_peaks`); None before the first phase has ended."""
    timed_seconds: tuple[float, ...] = ()
    """Of each optimizer step of the whole global batch that was timed by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed(Ending):
    """The trial ended in some other way, without a result."""

    kind: ClassVar[str] = "crashed"
    reason: str
    phase: str | None = None
    signal: str | None = None
    exit_code: int | None = None
    stderr_tail: str = ""
    """The last lines that the trial wrote to standard error."""
    transient: bool = False
    """Whether the machinery failed rather than the config (a lost worker, a full disk, a device held by others): the
    next search does not take it for an answer."""
    worker_lost: bool = False
    """Whether the worker was lost that ran the trial, alone or with its node: the config may be the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged(Ending):
    """The loss is not finite, or differs from what the same mathematics gives without the technique."""

    kind: ClassVar[str] = "diverged"
    reason: str
    losses: tuple[float | None, ...] = ()
    """Loss of each step; None where it was not finite (JSON has no NaN)."""
    reference_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported(Ending):
    """The config cannot work here, known before anything ran."""

    kind: ClassVar[str] = "unsupported"
    reason: str


Outcome = Fits | OutOfMemory | TimedOut | Crashed | Diverged | Unsupported
OUTCOMES: dict[str, type[Any]] = {kind.kind: kind for kind in get_args(Outcome)}
"""By their names in JSON."""


def machinery_failed(outcome: Outcome) -> TypeGuard[Crashed]:
    """Whether what failed is what runs the trials, so that this one says nothing about its config."""
    return isinstance(outcome, Crashed) and outcome.transient


def worker_was_lost(outcome: Outcome) -> bool:
    """Whether the worker was lost that ran the trial."""
    return isinstance(outcome, Crashed) and outcome.worker_lost


def outcome_from_json(data: Mapping[str, Any]) -> Outcome:
    """An outcome from its JSON object; raises `ValueError` for a kind that does not exist."""
    kind = data.get("outcome")
    if kind == Fits.kind:
        return Fits(measurement=Measurement.from_json(data["measurement"]))
    if kind not in OUTCOMES:
        raise ValueError(f"no such outcome: {kind!r}")
    outcome: Outcome = OUTCOMES[kind].from_json({name: value for name, value in data.items() if name != "outcome"})
    return outcome


def now() -> str:
    """The time as a trial's `recorded_at`: ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def seconds_since(moment: str) -> float:
    """What has passed since such a time."""
    return max((datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds(), 0.0)


def context_keys(hardware: Hardware, stack: Stack, workload: Workload) -> dict[str, Any]:
    """The context as the store's queries take it."""
    return {"hardware_key": hardware.key, "stack_key": stack.key, "workload_key": workload.key}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One real run of one config, as it is stored."""

    config: Config
    workload: Workload
    hardware: Hardware
    stack: Stack
    memory_limit_bytes: int
    """The limit that was enforced on the trial's device memory."""
    outcome: Outcome
    seconds: float
    """Wall time of the whole trial, set-up included."""
    recorded_at: str
    """When it ended, ISO 8601 in UTC."""
    trial_id: int | None = field(default=None, compare=False)
    """Its number in the store; None before it is stored."""
    prediction: Prediction | None = None
    """What the estimator predicted before the trial ran; None where it predicted nothing."""
    device_state: DeviceState | None = None
    """What else went on with the device; None where it was not observed, and for trials stored before it was."""
    node: str | None = field(default=None, compare=False)
    """The machine that it ran on; the store keeps it but does not read it back."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the time that the trial took cannot be trusted, each in a few words; empty if it can, and for an outcome
        that is none of time."""
        if self.device_state is None or not isinstance(self.outcome, Fits | TimedOut):
            return ()
        return self.device_state.doubts(self.hardware)

    @property
    def why_set_aside(self) -> str | None:
        """Why its time counts for nothing, even where there is no other (`DeviceState.set_aside`); None if it counts,
        and for an outcome that is none of time."""
        if self.device_state is None or not isinstance(self.outcome, Fits | TimedOut):
            return None
        return self.device_state.set_aside

    def set_aside(self, reason: str) -> Trial:
        """The trial as one of a device that is not what it is called."""
        return replace(self, device_state=replace(self.device_state or DeviceState(seconds=0.0), set_aside=reason))

    @property
    def measurement(self) -> Measurement | None:
        """What it measured; None unless it fits."""
        return self.outcome.measurement if isinstance(self.outcome, Fits) else None

    @property
    def timed_in_full(self) -> bool:
        """Whether it shows its config's speed, as far as one trial can."""
        return (
            isinstance(self.outcome, Fits) and not self.outcome.measurement.stopped_early and self.why_set_aside is None
        )

    @property
    def ran_out_on_device(self) -> bool:
        """Whether it was the device's memory that ran out, and not the host's."""
        return isinstance(self.outcome, OutOfMemory) and not self.outcome.host

    def fits_within(self, memory_limit_bytes: int) -> bool:
        return isinstance(self.outcome, Fits) and self.outcome.measurement.device_bytes <= memory_limit_bytes

    @property
    def least_step_seconds(self) -> float | None:
        """What a trial that ended before it could measure its step shows that it takes at least; None for any other."""
        return self.outcome.least_step_seconds if isinstance(self.outcome, TimedOut) else None

    @property
    def proven_step_seconds(self) -> float | None:
        """The same, where it is beyond doubt."""
        return self.least_step_seconds if isinstance(self.outcome, TimedOut) and self.outcome.is_proven else None

    def to_json(self) -> dict[str, Any]:
        body = self.outcome.to_json()
        return {
            "outcome": body.pop("outcome"),
            "config": self.config.to_json(),
            "hardware": self.hardware.to_json(),
            "stack": self.stack.to_json(),
            "workload": self.workload.to_json(),
            **body,
            **({} if self.prediction is None else {"prediction": self.prediction.to_json()}),
            **({} if self.device_state is None else {"device_state": self.device_state.to_json()}),
            "memory_limit_bytes": self.memory_limit_bytes,
            "seconds": self.seconds,
            "recorded_at": self.recorded_at,
            "trial_id": self.trial_id,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial:
        values = {
            field.name: data[field.name] for field in fields(cls) if field.name in data and field.name != "outcome"
        }
        rest = {name: value for name, value in data.items() if name not in values}
        return read(cls, {**values, "outcome": outcome_from_json(rest)})
