"""What a user asks for, as values: each option is the same in every command that takes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Unpack

from autofit.catalog.answer_cache import cached_answer
from autofit.catalog.models import Model, in_catalog, load, names, positions, shape
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.errors import UsageError
from autofit.core.lengths import Lengths
from autofit.core.units import LARGEST_INTEGER, MIB, format_bytes
from autofit.core.workload import Goal, Workload, WorkloadFields, WorkloadKeywords, check_count
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.techniques import Job
from autofit.techniques.habits import trainer_by_name
from autofit.trial.machine.nvml import BUSY_BYTES, visible
from autofit.trial.program.command import Command

USUAL_SECONDS = 600.0
"""A search's time budget unless another is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions(WorkloadFields):
    """The workload options of the command line."""

    lengths: Lengths | None = None

    @classmethod
    def of(cls, *, model: str, command: str | None = None, **given: Unpack[WorkloadKeywords]) -> WorkloadOptions:
        """The options as a user gives them. Raises `UsageError` for what are no lengths or no command that can run."""
        values: dict[str, Any] = {**given, "lengths": Lengths.given(given.get("lengths"))}
        options = cls(model=model, program=command, **values)
        if command is not None:
            Command.parse(command)
            options._check_alone()
        return options

    @classmethod
    def of_workload(cls, workload: Workload, *, model: str) -> WorkloadOptions:
        """The options that resolve to `workload`, whose model is loaded from `model`."""
        values = {field.name: getattr(workload, field.name) for field in fields(cls)}
        lengths = None if workload.lengths is None else Lengths(workload.lengths, workload.seq_len)
        return cls(**{**values, "model": model, "lengths": lengths})

    def resolve(self) -> tuple[Model, Workload]:
        """The model's architecture, and the workload; raises `UsageError` for what cannot be trained."""
        self._check_numbers()
        model = load(self.model)
        longest = positions(model)
        seq_len, lengths = self.cut()
        if longest is not None and seq_len > longest:
            raise UsageError(f"seq-len {seq_len} is longer than the {longest} positions of {model.name}")
        trainer = None if self.trainer is None else trainer_by_name(self.trainer).name
        values = {"model": model.name, "seq_len": seq_len, "lengths": lengths, "trainer": trainer}
        return model, Workload(**{**asdict(self), **values}, model_digest=model.digest)

    def cut(self) -> tuple[int, tuple[int, ...] | None]:
        """The tokens of the longest sequence, and the workload's lengths."""
        if self.lengths is None:
            return self.seq_len, None
        cut = self.lengths.cut(self.seq_len)
        return cut.longest, cut.tokens

    def _check_numbers(self) -> None:
        """Raise `UsageError` for numbers out of range. Not checked in `Workload`: a store may have trials that failed
        because of them."""
        for name in ("seq_len", "global_batch", "devices", "eval_batch"):
            if (count := getattr(self, name)) is not None:
                check_count(name.replace("_", "-"), count)
        if abs(self.seed) > LARGEST_INTEGER:
            raise UsageError(f"seed is {self.seed}: it must be from {-LARGEST_INTEGER} to {LARGEST_INTEGER}")

    def _check_alone(self) -> None:
        """Raise `UsageError` for options of autofit's own step beside a command that trains by itself."""
        if self.devices > 1:
            raise UsageError(f"--command trains on one device for now: leave --devices {self.devices} out")
        for option, value, instead in (
            (f"--for {self.trainer}", self.trainer, "trains as your program does"),
            ("--lengths", self.lengths, "trains on your program's own data"),
            ("--eval-batch", self.eval_batch, "evaluates if your program does"),
        ):
            if value is not None:
                raise UsageError(f"--command {instead}, whatever {option} says: leave one of them out")

    def job(self, site: tuple[Hardware, Stack]) -> Job:
        """The job on a hardware and stack. Raises `UsageError` for what cannot be trained, as by an unknown loss."""
        model, workload = self.resolve()
        _check_loss(model)
        return Job(model=model, workload=workload, hardware=site[0], stack=site[1])


def departures(workload: WorkloadOptions | Workload) -> dict[str, Any]:
    """The options of a workload that have other values than by default, and the two that every workload is known by."""
    options = (field for field in fields(WorkloadOptions) if field.name != "model")
    always = ("seq_len", "global_batch")
    return {
        option.name: value
        for option in options
        if (value := getattr(workload, option.name)) != option.default or option.name in always
    }


def _check_loss(model: Model) -> None:
    """Raise `UsageError` for a model with another loss than its own. Tests check the catalog's models."""
    if in_catalog(model):
        return

    def compared() -> dict[str, Any]:
        # Imported here because it needs transformers, which others need not wait for.
        from autofit.training.loss_check import why_another_loss

        shape(model)  # raises if no model can be built at all
        reason = why_another_loss(model)
        if reason is not None:
            raise UsageError(reason)  # which no file keeps
        return {}

    cached_answer("own loss", json.dumps(dict(model.config), sort_keys=True), compared)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """One search."""

    workload: WorkloadOptions
    goal: Goal = field(default_factory=Goal)
    space: str | None = None
    """Name or file of the search space; None for the hardware's default."""
    hardware: str = "auto"
    device: str = "auto"
    memory_limit_bytes: int | None = None
    max_trials: int | None = None
    time_budget_seconds: float | None = USUAL_SECONDS
    workers: int | None = None
    ray_address: str | None = None
    in_place: bool = False
    """Run trials without Ray."""
    store: str | None = None
    fresh: bool = False
    thorough: bool = False
    """After finding the best config, go on to the whole frontier, until a limit is reached or every config has run."""
    predict: bool = True
    """Estimate every config before the first trial. Otherwise the search learns from trials alone, and a config is
    ruled out before it runs only if its bare weights, gradients and states do not fit."""
    campaign_id: str | None = None
    """Shared by searches that are asked for together; no part of the question."""

    def __post_init__(self) -> None:
        if self.max_trials is not None and self.max_trials < 1:
            raise UsageError(f"max-trials is {self.max_trials}: it must be at least 1")
        check_driven(workers=self.workers, ray_address=self.ray_address, in_place=self.in_place)

    def question(self, job: Job, memory_limit: int, lattice_digest: str) -> dict[str, Any]:
        """What the search asks, as a JSON object: searches with equal questions have equal answers."""
        # Included only if they are not the default, so that earlier versions' questions still compare equal.
        unusual = {"thorough": True} if self.thorough else {}
        unusual |= {} if self.predict else {"predict": False}
        return unusual | {
            "goal": asdict(self.goal),
            "hardware": job.hardware.key,
            "stack": job.stack.key,
            "workload": job.workload.key,
            "memory_limit_bytes": memory_limit,
            "lattice": lattice_digest,
            "estimator": ESTIMATOR_VERSION,  # another version may predict that other configs fit
        }


def check_driven(*, workers: int | None, ray_address: str | None, in_place: bool) -> None:
    """Raise `UsageError` for options of whoever drives searches that exclude each other."""
    if in_place and workers not in (None, 1):
        raise UsageError("--in-place runs one trial at a time: leave --workers out")
    if in_place and ray_address is not None:
        raise UsageError("--in-place runs trials here, without Ray: leave --ray-address out")
    if workers is not None and workers < 1:
        raise UsageError(f"workers is {workers}: it must be at least 1")


def memory_limit(requested: int | None, hardware: Hardware, devices: int = 1) -> int:
    """The limit in bytes that is enforced on each of a trial's `devices` ranks, which on the CPU share the host's
    memory. Raises `UsageError` for one above the memory that there is."""
    shared_by = devices if hardware.kind == "cpu" else 1
    if requested is None:
        return int(hardware.memory_bytes * 0.8) // shared_by if hardware.kind == "cpu" else hardware.memory_bytes
    if requested * shared_by > hardware.memory_bytes:
        option = f"memory-limit {format_bytes(requested)}"
        if shared_by > 1:
            option += f" for each of {devices} ranks"
        raise UsageError(f"{option} is more than the {format_bytes(hardware.memory_bytes)} of {hardware.name}")
    return requested


def memory_limit_here(requested: int | None, hardware: Hardware, devices: int = 1) -> int:
    """`memory_limit` on this machine's devices. Without a `requested` one, what a display or another program uses of
    the trial's GPUs is left alone: the limit is what is left of the fullest of them."""
    limit = memory_limit(requested, hardware, devices)
    if requested is not None or hardware.kind != "cuda":
        return limit
    for device in map(visible, range(devices)):
        if device is not None and device.held_bytes > BUSY_BYTES:
            # Rounded: small changes in what a display takes are not to turn every search into a new question.
            left = (device.memory_bytes - device.held_bytes) // (512 * MIB) * (512 * MIB)
            limit = max(0, min(limit, left))
    return limit


def hub_id(model: str) -> str:
    """Where a trainer loads the weights from: the catalog's hub id, or the folder or hub id that the user named."""
    if model.lower() in names():
        return load(model).source.partition(",")[0]
    path = Path(model).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
    # Absolute, because a trainer takes a bare `name/folder` for a hub repository.
    return str(path.resolve()) if path.exists() else model
