"""What training a config requires of the machine, apart from packages; checked before a trial starts."""

from __future__ import annotations

from autofit.core.errors import EnvironmentLacks
from autofit.core.lattice import Config, Value
from autofit.techniques import Job, unsupported
from autofit.training.prerequisites import native_ops, nvme, trl_loss


def cannot_here(config: Config, job: Job) -> str | None:
    """Why `config` cannot be trained for `job` on this machine, in one sentence; None if it can."""
    return unsupported(config, job) or lacking_here(config, job)


def lacking_here(config: Config, job: Job) -> str | None:
    """What this machine lacks for `config`, which must be supported for `job`, in one sentence; None if nothing."""
    try:
        native_ops.require(config)
        trl_loss.require(job)
        if config["offload"] == "nvme":
            nvme.require(config, job)
    except EnvironmentLacks as error:
        return str(error)
    return None


def asks(config: Config, job: Job) -> tuple[Value | None, ...]:
    """The values on which `lacking_here` depends: configs of a workload for which they are equal lack the same things.
    Empty for a config with no requirements on the machine."""
    if not native_ops.needed(config):
        return (job.workload.trainer,) if trl_loss.needed(job) else ()
    return tuple(config.get(axis) for axis in ("offload", "precision", "method", "rank"))
