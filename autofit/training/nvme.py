"""The folder for offload=nvme: whether it is there, writable and large enough."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from autofit.catalog.models import shape
from autofit.errors import EnvironmentLacks
from autofit.lattice import Config
from autofit.techniques import Job
from autofit.techniques.sharding import NVME_VARIABLE
from autofit.units import format_bytes

ADAM_COPIES = 4
"""Of every trained parameter: the master copy, the gradient, momentum and variance."""


def needed_bytes(config: Config, job: Job) -> int:
    """What DeepSpeed writes for `config`, all ranks together, as if one disk held it all: parameters and an Adam's four
    tensors. All parameters count as trained: adapters need less."""
    kept, used = {"bf16": (2, 2), "fp32": (4, 4)}.get(config.text("precision"), (4, 2))
    return shape(job.model).parameters * (ADAM_COPIES * kept + used)


def require(config: Config, job: Job) -> Path:
    """The folder that the user named; raises `EnvironmentLacks` if there is none that `config` can be written to."""
    named = os.environ.get(NVME_VARIABLE)
    if not named:
        raise EnvironmentLacks(
            "offload=nvme needs a folder on a fast disk, and none is named", remedy=f"set {NVME_VARIABLE} to one"
        )
    folder = Path(named)
    if not folder.is_dir():
        raise EnvironmentLacks(f"offload=nvme: there is no folder {folder}", remedy=f"make it, or set {NVME_VARIABLE}")
    try:
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


def require_on_all_ranks(config: Config, job: Job) -> Path:
    """`require` on every rank of the default process group before any of them goes on. All must call this.

    Each looks for itself, because which ranks share a host, and a disk, none of them knows; so each asks for the room
    of all. None writes before all have looked: its files would be missing from the room that the others find.
    """
    import torch

    folder = require(config, job)
    torch.distributed.all_reduce(torch.zeros(()))  # in host memory, hence gloo's
    return folder
