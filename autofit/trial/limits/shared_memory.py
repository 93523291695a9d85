"""Shared-memory segments left behind by a killed rank: their names outlive every process that knew them."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")


def segments() -> set[Path]:
    """This user's segments of NCCL, which removes a segment's name once all ranks have mapped it
    (src/misc/shmutils.cc): a rank that dies before that leaves it behind. Gloo makes none, nor does DeepSpeed without
    LOCAL_SIZE in the environment."""
    paths = set()
    for path in FOLDER.glob("nccl-*"):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                paths.add(path)
    return paths


def remove_orphans(before: set[Path]) -> None:
    """Remove segments that are not in `before`, an earlier result of `segments`, and that no process has mapped."""
    until = time.monotonic() + 1.0
    while orphans := [path for path in segments() - before if not is_mapped(path)]:
        for path in orphans:
            with suppress(OSError):
                # A younger segment may be one that another trial is about to map.
                if time.time() - path.stat().st_mtime > 1.0:
                    path.unlink()
        if time.monotonic() > until:
            return
        time.sleep(0.05)


def is_mapped(segment: Path) -> bool:
    """Whether any process that this user may inspect has the segment mapped, under whatever name (proc(5), maps)."""
    try:
        status = segment.stat()
    except OSError:
        return False
    mark = f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} ".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                if mark in (process / "maps").read_bytes():  # names of files in it may be no text
                    return True
    return False
