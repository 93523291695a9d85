"""The folder for offload=nvme: whether it is there, writable and large enough; each trial has one of its own in it."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from autofit.catalog.models import shape
from autofit.errors import EnvironmentLacks
from autofit.lattice import Config
from autofit.techniques import Job
from autofit.techniques.deepspeed_settings import locked_elements
from autofit.techniques.sharding import NVME_VARIABLE
from autofit.units import format_bytes

ADAM_COPIES = 4
"""Of every trained parameter: the master copy, the gradient, momentum and variance."""
PREFIX = "autofit-trial-"
"""Of trials' folders."""
LOCKS_ALL = 14
"""The bit of the capability to lock memory without limit, CAP_IPC_LOCK (capabilities(7))."""


def needed_bytes(config: Config, job: Job) -> int:
    """What DeepSpeed writes for `config`, all ranks together, as if one disk held it all: parameters, and an Adam's
    four tensors of those that are trained. An adapter counts as one of a square matrix: 2 * rank / hidden_size of a
    layer's weights."""
    kept, used = _widths(config)
    model = shape(job.model)
    trained = float(model.parameters)
    if config["method"] != "full":
        trained = model.linear_parameters * 2 * config.number("rank") / model.hidden_size
    return int(model.parameters * used + trained * ADAM_COPIES * kept)


def locked_bytes(config: Config, job: Job) -> int:
    """Of a rank's buffers for files, at most."""
    kept, used = _widths(config)
    of_parameters, of_states = locked_elements(job)
    return of_parameters * used + of_states * kept


def _widths(config: Config) -> tuple[int, int]:
    """Bytes of a number in the optimizer, and of one in the weights."""
    return {"bf16": (2, 2), "fp32": (4, 4)}.get(config.text("precision"), (4, 2))


def require(config: Config, job: Job) -> Path:
    """The folder that the user named; raises `EnvironmentLacks` if there is none that `config` can be written to, or if
    its buffers cannot be locked in memory, which would abort the process. What killed trials have left is removed."""
    most = lockable_bytes()
    if most is not None and most < (locked := locked_bytes(config, job)):
        raise EnvironmentLacks(
            f"offload=nvme locks {format_bytes(locked)} of memory, and this process may lock {format_bytes(most)}",
            remedy="ulimit -l unlimited (in containers --ulimit memlock=-1)",
        )
    named = os.environ.get(NVME_VARIABLE)
    if not named:
        raise EnvironmentLacks(
            "offload=nvme needs a folder on a fast disk, and none is named", remedy=f"set {NVME_VARIABLE} to one"
        )
    folder = Path(named)
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
    """How much memory this process may lock; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        held = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
        if held >> LOCKS_ALL & 1:
            return None
    return None if limit == resource.RLIM_INFINITY else limit


def require_on_all_ranks(config: Config, job: Job) -> Path:
    """`require` on every rank of the default process group before any of them goes on. All must call this.

    Each looks for itself, because which ranks share a host, and a disk, none of them knows; so each asks for the room
    of all. None writes before all have looked: its files would be missing from the room that the others find.
    """
    import torch

    folder = require(config, job)
    torch.distributed.all_reduce(torch.zeros(()))  # in host memory, hence gloo's
    return folder


def own_prefix() -> str:
    """Of the folders of this machine, or of this container, whose processes have numbers of their own: the disk may be
    shared."""
    return f"{PREFIX}{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}-"


def remove_orphans() -> None:
    """Remove what processes of this machine have left in the folder that were killed before they could."""
    named = os.environ.get(NVME_VARIABLE)
    if not named:
        return
    with suppress(OSError):
        own = own_prefix()
        for left in Path(named).glob(f"{own}*"):
            owner = left.name.removeprefix(own).partition("-")[0]
            if owner.isdecimal() and not Path("/proc", owner).exists():
                shutil.rmtree(left, ignore_errors=True)
