"""A folder of its own for each trial that swaps to files: DeepSpeed's have the same names in every trial, and stay."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from autofit.techniques.sharding import NVME_VARIABLE

PREFIX = "autofit-trial-"


@contextmanager
def swap_folder(request: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """What to add to the environment of the trial that `request` spells; its files are gone afterwards.

    Nothing where it does not swap, or where no folder can be made: the trial itself then says what is wrong.
    """
    named = os.environ.get(NVME_VARIABLE)
    if named is None or request.get("config", {}).get("offload") != "nvme":
        yield {}
        return
    made: str | None = None
    with suppress(OSError):
        _remove_orphans(Path(named))
        made = tempfile.mkdtemp(prefix=f"{own_prefix()}{os.getpid()}-", dir=named)
    try:
        yield {} if made is None else {NVME_VARIABLE: made}
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def own_prefix() -> str:
    """Of the folders of this machine, or of this container, whose processes have numbers of their own: the disk may be
    shared."""
    return f"{PREFIX}{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}-"


def _remove_orphans(folder: Path) -> None:
    """Remove what processes of this machine have left that were killed before they could."""
    own = own_prefix()
    for left in folder.glob(f"{own}*"):
        owner = left.name.removeprefix(own).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(left, ignore_errors=True)
