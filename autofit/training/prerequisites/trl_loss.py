"""trl's own loss, which trials with its habits run on a GPU: checks that it is installed and can be compiled."""

from __future__ import annotations

from importlib.util import find_spec

from autofit.core.errors import EnvironmentLacks
from autofit.techniques import Job
from autofit.techniques.axes.compilation import missing_tool
from autofit.techniques.habits import replaces_loss


def needed(job: Job) -> bool:
    """Whether a trial of `job` runs trl's kernels."""
    return job.hardware.kind == "cuda" and replaces_loss(job)


def require(job: Job) -> None:
    """Raise `EnvironmentLacks` if `job` needs them and this machine lacks something for it."""
    if not needed(job):
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
