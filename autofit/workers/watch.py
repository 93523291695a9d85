"""Ends a worker as soon as its search's process ends: one that outlived its search would keep the device."""

from __future__ import annotations

import os
import select
import threading


def end_with(process_id: int) -> None:
    """End this process, whatever it is doing, when the process `process_id` of this machine ends.

    Where the kernel cannot tell (before Linux 5.3), nothing is watched, and Ray notices after a while.
    """
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return
    threading.Thread(target=_wait, args=(descriptor,), name="watch", daemon=True).start()


def _wait(descriptor: int) -> None:
    select.select([descriptor], [], [])
    os._exit(1)
