"""Searches of tests: begun by a driver that may have gone, and leases that time has ended."""

from __future__ import annotations

import platform
from typing import Any

from sqlalchemy import text

from autofit.core.outcome import Trial
from autofit.store import Lease, Store
from autofit.store.searches.lease import pid_namespace


def begin(store: Store, trial: Trial, search_id: str = "s1", *, owner: str | None = None, **request: Any) -> Lease:
    """A search of the hardware, stack and workload of `trial`, as another process's that goes on."""
    return store.queue.begin(
        search_id,
        owner or "elsewhere:1:0",
        digest=search_id,
        hardware=trial.hardware,
        stack=trial.stack,
        workload=trial.workload,
        request=request,
    )


def submit(store: Store, trial: Trial, digest: str = "d1", **more: Any) -> str:
    """A queued search for the hardware of `trial`."""
    asked = {"digest": digest, "workload": trial.workload, "hardware_name": trial.hardware.name}
    return store.queue.submit(**asked, request={"asked": {}}, **more)


def expire(store: Store) -> None:
    """Let the time of all leases pass."""
    with store._database.write() as connection:
        connection.execute(text("UPDATE searches SET lease_expires_at = 0 WHERE state = 'running'"))


def a_gone_process() -> str:
    """The owner that a process of this machine was which has ended."""
    return f"{platform.node()}:{2**22 + 1}:{pid_namespace()}-0"  # above Linux's largest
