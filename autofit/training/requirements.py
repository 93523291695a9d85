"""What training a config needs of the machine that runs it, beside packages: known before a trial starts."""

from __future__ import annotations

from autofit.errors import EnvironmentLacks
from autofit.lattice import Config
from autofit.techniques import Job, unsupported
from autofit.training import native_ops, nvme


def cannot_here(config: Config, job: Job) -> str | None:
    """Why `config` cannot be trained for `job` on this machine, in one sentence; None where it can."""
    reason = unsupported(config, job)
    if reason is not None:
        return reason
    try:
        native_ops.require(config)
        if config["offload"] == "nvme":
            nvme.require(config, job)
    except EnvironmentLacks as error:
        return str(error)
    return None
