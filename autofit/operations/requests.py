"""What a user asks for, as values: the same options in every command that takes them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autofit.catalog.models import Model, in_catalog, load, names, positions, shape
from autofit.errors import UsageError
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.hardware import Hardware, Stack
from autofit.techniques import Job
from autofit.trial.nvml import BUSY_BYTES, visible
from autofit.units import MIB
from autofit.workload import LARGEST_SEED, Goal, Workload, check_count

LIMIT_STEP_BYTES = 512 * MIB
"""A default limit beside other programs is a multiple of this."""
CPU_SHARE = 0.8
"""Share of the host's memory that a CPU trial may take unless told: the rest is the system's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The workload options of the command line."""

    model: str
    seq_len: int = 2048
    global_batch: int = 64
    lora_dropout: float = 0.0
    devices: int = 1
    seed: int = 0

    def resolve(self) -> tuple[Model, Workload]:
        """The model's architecture, and the workload; raises `UsageError` for what cannot be trained."""
        self._check_numbers()
        model = load(self.model)
        longest = positions(model)
        if longest is not None and self.seq_len > longest:
            raise UsageError(f"seq-len {self.seq_len} is longer than the {longest} positions of {model.name}")
        return model, Workload(
            model=model.name,
            model_digest=model.digest,
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            lora_dropout=self.lora_dropout,
            devices=self.devices,
            seed=self.seed,
        )

    def _check_numbers(self) -> None:
        """Raise `UsageError` for numbers that nothing could be counted with. Here and not in `Workload`: a store may
        have trials that failed for them."""
        for name in ("seq_len", "global_batch", "devices"):
            check_count(name.replace("_", "-"), getattr(self, name))
        if abs(self.seed) > LARGEST_SEED:
            raise UsageError(f"seed is {self.seed}: it must be from {-LARGEST_SEED} to {LARGEST_SEED}")

    def job(self, site: tuple[Hardware, Stack]) -> Job:
        """The job on the given hardware and stack.

        Raises `UsageError` for what cannot be trained, among it an architecture whose loss autofit does not know.
        """
        model, workload = self.resolve()
        _check_loss(model)
        return Job(model=model, workload=workload, hardware=site[0], stack=site[1])


def _check_loss(model: Model) -> None:
    """Raise `UsageError` for a model that would be trained with another loss than its own. Those of the catalog are
    compared by the tests."""
    if in_catalog(model):
        return
    # Imported here because it needs torch, which the catalog's models do not wait for.
    from autofit.training.own_logits import why_another_loss

    shape(model)  # says it where no model can be built at all
    reason = why_another_loss(model)
    if reason is not None:
        raise UsageError(reason)


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
    time_budget_seconds: float | None = 600.0
    workers: int | None = None
    ray_address: str | None = None
    in_place: bool = False
    """Run trials without Ray."""
    store: str | None = None
    fresh: bool = False
    thorough: bool = False
    """Go on for the whole frontier when the best config is found, until a limit is reached or every config has run."""
    predict: bool = True
    """Estimate every config before the first trial. Without that the search learns from trials alone, and only the bare
    weights, gradients and states rule a config out before it runs."""

    def __post_init__(self) -> None:
        if self.max_trials is not None and self.max_trials < 1:
            raise UsageError(f"max-trials is {self.max_trials}: it must be at least 1")
        if self.in_place and self.workers not in (None, 1):
            raise UsageError("--in-place runs one trial at a time: leave --workers out")
        if self.in_place and self.ray_address is not None:
            raise UsageError("--in-place runs trials here, without Ray: leave --ray-address out")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers is {self.workers}: it must be at least 1")

    def question(self, job: Job, memory_limit: int, lattice_digest: str) -> dict[str, Any]:
        """What makes two searches ask the same, as JSON: equal questions have equal answers."""
        # Named only where they are not the usual, as in the questions of earlier versions.
        unusual = {"thorough": True} if self.thorough else {}
        unusual |= {} if self.predict else {"predict": False}
        return unusual | {
            "goal": asdict(self.goal),
            "hardware": job.hardware.key,
            "stack": job.stack.key,
            "workload": job.workload.key,
            "memory_limit_bytes": memory_limit,
            "lattice": lattice_digest,
            "estimator": ESTIMATOR_VERSION,  # what was predicted not to fit may be predicted otherwise
        }


def memory_limit(asked: int | None, hardware: Hardware, devices: int = 1) -> int:
    """The limit in bytes that is enforced on each of a trial's `devices` ranks, which on the CPU share its memory.

    Raises `UsageError` for more than there is.
    """
    shared_by = devices if hardware.kind == "cpu" else 1
    if asked is None:
        return int(hardware.memory_bytes * CPU_SHARE) // shared_by if hardware.kind == "cpu" else hardware.memory_bytes
    if asked * shared_by > hardware.memory_bytes:
        from autofit.units import format_bytes

        said = f"memory-limit {format_bytes(asked)}"
        if shared_by > 1:
            said += f" for each of {devices} ranks"
        raise UsageError(f"{said} is more than the {format_bytes(hardware.memory_bytes)} of {hardware.name}")
    return asked


def left_by_others(limit: int, hardware: Hardware, devices: int = 1) -> int:
    """`limit`, or on GPUs that a display or another program uses what those leave of the fullest of the trial's.

    In steps, so that what a display takes more or less does not make every search another question.
    """
    for number in range(devices if hardware.kind == "cuda" else 0):
        device = visible(number)
        if device is not None and device.held_bytes > BUSY_BYTES:
            left = (device.memory_bytes - device.held_bytes) // LIMIT_STEP_BYTES * LIMIT_STEP_BYTES
            limit = max(0, min(limit, left))
    return limit


def hub_id(model: str) -> str:
    """What a trainer loads the weights from: the catalog's hub id, or the folder or hub id that the user named."""
    if model.lower() in names():
        return load(model).source.partition(",")[0]
    path = Path(model).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
    # Absolute, because a trainer takes a bare `name/folder` for a repository of the hub.
    return str(path.resolve()) if path.exists() else model
