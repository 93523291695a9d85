"""What training a config requires of the machine, apart from packages; checked before a trial starts."""

from __future__ import annotations

from importlib.util import find_spec

from autofit.core.errors import EnvironmentLacks
from autofit.core.lattice import Config, Value
from autofit.techniques import Job, unsupported
from autofit.techniques.axes.compilation import missing_tool
from autofit.techniques.habits import replaces_loss
from autofit.training.prerequisites import native_ops, nvme


def why_not_trainable(config: Config, job: Job) -> str | None:
    """Why `config` cannot be trained for `job` on this machine, in one sentence; None if it can."""
    return unsupported(config, job) or missing_requirement(config, job)


def missing_requirement(config: Config, job: Job) -> str | None:
    """What this machine lacks for `config`, which must be supported for `job`, in one sentence; None if nothing."""
    try:
        native_ops.require(config)
        _require_trl(job)
        if config["offload"] == "nvme":
            nvme.require(config, job)
    except EnvironmentLacks as error:
        return str(error)
    return None


def requirement_key(config: Config, job: Job) -> tuple[Value | None, ...]:
    """The values on which `missing_requirement` depends: configs of a workload for which they are equal lack the same
    things. Empty for a config with no requirements on the machine."""
    if not native_ops.operations_of(config):
        return (job.workload.trainer,) if _needs_trl(job) else ()
    return tuple(config.get(axis) for axis in ("offload", "precision", "method", "rank"))


def _needs_trl(job: Job) -> bool:
    return job.hardware.kind == "cuda" and replaces_loss(job)


def _require_trl(job: Job) -> None:
    """Raise `EnvironmentLacks` if `job` needs trl's kernels and this machine lacks something for them."""
    if not _needs_trl(job):
        return
    try:
        missing = None if find_spec("trl.kernels.chunked_logprob") else "trl 1.16"
    except ImportError:  # trl is not there at all, or lacks one of its own requirements
        missing = "trl 1.16"
    missing = missing or missing_tool(job.hardware.kind)
    if missing is not None:
        raise EnvironmentLacks(
            f"--for trl runs trl's own loss on a GPU, which needs {missing} where the trials run",
            remedy="install it there, or leave --for out",
        )
