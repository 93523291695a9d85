"""A folder for each trial that swaps to files: DeepSpeed's have the same names in every trial and are left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from autofit.core.lattice import Config
from autofit.core.outcome import Crashed, Outcome
from autofit.core.units import format_bytes
from autofit.techniques.axes.sharding import NVME_VARIABLE
from autofit.training.prerequisites.nvme import own_prefix, remove_orphans


@contextmanager
def swap_folder(config: Config) -> Iterator[dict[str, str]]:
    """What to add to the environment of a trial of `config`; its files are removed afterwards.

    Nothing if the trial does not swap, or if no folder can be made: the trial itself then reports what is wrong.
    """
    folder: AbstractContextManager[str | None] = nullcontext()
    if NVME_VARIABLE in os.environ and config.get("offload") == "nvme":
        with suppress(OSError):
            remove_orphans()
            prefix, parent = f"{own_prefix()}{os.getpid()}-", os.environ[NVME_VARIABLE]
            folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    with folder as path:
        yield {} if path is None else {NVME_VARIABLE: path}


def explained(outcome: Outcome, environment: Mapping[str, str]) -> Outcome:
    """The outcome, with a full disk added as the reason if a trial that was given this `environment` crashed while its
    disk was full. To be called while its files are still there. DeepSpeed does not check whether a write has failed,
    and aborts when it reads."""
    folder = environment.get(NVME_VARIABLE)
    if folder is None or not isinstance(outcome, Crashed) or outcome.transient:
        return outcome
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        # A write is then taken to have failed: DeepSpeed's are of 1 MiB, several at a time.
        if free < 64 * 1024**2:
            full = f"the disk of {Path(folder).parent} was full, with {format_bytes(free)} left"
            return replace(outcome, reason=f"{full}: {outcome.reason}", transient=True)
    return outcome
