"""What training a config needs of the machine that runs it, beside packages: known before a trial starts."""

from __future__ import annotations

from autofit.errors import EnvironmentLacks
from autofit.lattice import Config, Value
from autofit.techniques import Job, unsupported
from autofit.training import native_ops, nvme


def cannot_here(config: Config, job: Job) -> str | None:
    """Why `config` cannot be trained for `job` on this machine, in one sentence; None where it can."""
    return unsupported(config, job) or lacking_here(config, job)


def lacking_here(config: Config, job: Job) -> str | None:
    """What this machine lacks for `config`, which is supported for `job`, in one sentence; None where nothing."""
    try:
        native_ops.require(config)
        if config["offload"] == "nvme":
            nvme.require(config, job)
    except EnvironmentLacks as error:
        return str(error)
    return None


def asks(config: Config) -> tuple[Value | None, ...]:
    """What decides over `lacking_here`: configs in which it is equal lack the same. Empty for one that needs nothing of
    a machine."""
    if not native_ops.needed(config):
        return ()
    return tuple(config.get(axis) for axis in ("offload", "precision", "method", "rank"))
