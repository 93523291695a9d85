"""Ends a worker as soon as its search's process ends: one that outlived its search would keep the device."""

from __future__ import annotations

import os
import select
import signal
import threading


def end_with(process_id: int, *, group: bool = False) -> None:
    """End this process, whatever it is doing, when the process `process_id` of this machine ends; with `group`, its
    whole process group. Before Linux 5.3 nothing is watched, and Ray notices after a while."""
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return
    threading.Thread(target=_wait, args=(descriptor, group), name="watch", daemon=True).start()


def _wait(descriptor: int, group: bool) -> None:
    select.select([descriptor], [], [])
    if group:
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
