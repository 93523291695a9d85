"""The folder for offload=nvme: checks that it exists, is writable and has room; each trial has its own subfolder."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from autofit.catalog.models import shape
from autofit.core.errors import EnvironmentLacks
from autofit.core.lattice import Config
from autofit.core.units import format_bytes
from autofit.techniques import Job
from autofit.techniques.axes.precision import is_mixed, product_format
from autofit.techniques.axes.sharding import NVME_VARIABLE
from autofit.techniques.deepspeed_settings import locked_elements
from autofit.techniques.job import ranks_per_host

PREFIX = "autofit-trial-"
"""Prefix of the trials' folders."""


def needed_bytes(config: Config, job: Job) -> int:
    """Bytes that DeepSpeed writes on one machine for `config`: its ranks' shares of the parameters, and of Adam's four
    tensors for each trained parameter. Every adapter is counted as if its layer's matrix were square: 2 * rank /
    hidden_size of the layer's weights. Each machine is taken to have a disk of its own."""
    state_width, weight_width = _widths(config)
    model = shape(job.model)
    trained = float(model.parameters)
    if config["method"] != "full":
        trained = model.linear_parameters * 2 * config.number("rank") / model.hidden_size
    share = ranks_per_host(job) / job.workload.devices
    # Adam stores the master copy, the gradient, momentum and variance.
    return int(share * (model.parameters * weight_width + trained * 4 * state_width))


def locked_bytes(config: Config, job: Job) -> int:
    """Upper bound on the bytes of locked memory in one rank's file buffers."""
    state_width, weight_width = _widths(config)
    of_parameters, of_states = locked_elements(job)
    return of_parameters * weight_width + of_states * state_width


def _widths(config: Config) -> tuple[int, int]:
    """Bytes per element of the optimizer's tensors, and of the weights."""
    width = 4 if product_format(config) == "fp32" else 2
    return 4 if is_mixed(config) else width, width


def require(config: Config, job: Job) -> Path:
    """The folder that the user named. Raises `EnvironmentLacks` if there is none, if it cannot be written to or has too
    little room for `config`, or if the buffers cannot be locked in memory, which would abort the process. Removes what
    killed trials have left behind."""
    lockable = lockable_bytes()
    if lockable is not None and lockable < (locked := locked_bytes(config, job)):
        raise EnvironmentLacks(
            f"offload=nvme locks {format_bytes(locked)} of memory, and this process may lock {format_bytes(lockable)}",
            remedy="ulimit -l unlimited (in containers --ulimit memlock=-1)",
        )
    path = os.environ.get(NVME_VARIABLE)
    if not path:
        raise EnvironmentLacks(
            "offload=nvme needs a folder on a fast disk, and none is set", remedy=f"set {NVME_VARIABLE} to one"
        )
    folder = Path(path)
    if not folder.is_dir():
        raise EnvironmentLacks(f"offload=nvme: there is no folder {folder}", remedy=f"make it, or set {NVME_VARIABLE}")
    try:
        remove_orphans()
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        raise EnvironmentLacks(
            f"offload=nvme: {folder} cannot be written ({error.strerror})", remedy=f"set {NVME_VARIABLE} to another"
        ) from error
    if free < (needed := needed_bytes(config, job)):
        raise EnvironmentLacks(
            f"offload=nvme needs {format_bytes(needed)} in {folder}, which has {format_bytes(free)} free",
            remedy=f"free some space there, or set {NVME_VARIABLE} to another folder",
        )
    return folder


def lockable_bytes() -> int | None:
    """Bytes of memory that this process may lock; None if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        capabilities = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
        # CAP_IPC_LOCK of capabilities(7): to lock memory without limit.
        if capabilities >> 14 & 1:
            return None
    return None if limit == resource.RLIM_INFINITY else limit


def require_on_all_ranks(config: Config, job: Job) -> Path:
    """`require` on every rank of the default process group before any of them proceeds; all ranks must call this.

    Each rank checks for itself, and for the space that all ranks of its machine need together. None writes before all
    have checked: its files would reduce the free space that the others find.
    """
    import torch

    folder = require(config, job)
    torch.distributed.all_reduce(torch.zeros(()))  # in host memory, so reduced by gloo
    return folder


def own_prefix() -> str:
    """Prefix of the folders of this machine, or of this container where process ids are its own: the disk may be
    shared with others."""
    return f"{PREFIX}{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}-"


def remove_orphans() -> None:
    """Remove the subfolders of this machine's processes that were killed before they could remove them."""
    path = os.environ.get(NVME_VARIABLE)
    if not path:
        return
    with suppress(OSError):
        prefix = own_prefix()
        for subfolder in Path(path).glob(f"{prefix}*"):
            owner = subfolder.name.removeprefix(prefix).partition("-")[0]
            if owner.isdecimal() and not Path("/proc", owner).exists():
                shutil.rmtree(subfolder, ignore_errors=True)
