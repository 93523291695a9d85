"""Stands in for what a process does that probes a device."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

NAMES = ["first", "hangs", "dies", "fails", "last"]


def probe(request: dict[str, Any], reports: Connection) -> None:
    """Reports the parts that it is asked for; one of them hangs and one ends the process."""
    names = request["parts"] or NAMES
    reports.send({"parts": names})
    for name in names:
        reports.send({"begin": name})
        reports.send({"seconds_per": {f"launch/{name}": 1.0}})
        if name == "hangs":
            time.sleep(3600)
        if name == "dies":
            print("the driver has gone away", flush=True)
            os._exit(7)
        reports.send(
            {"end": name, "seconds": 0.5, "failure": "RuntimeError: no such kernel" if name == "fails" else None}
        )


def absent(request: dict[str, Any], reports: Connection) -> None:
    """Cannot even begin."""
    raise ImportError("No module named 'torch'")


def between(request: dict[str, Any], reports: Connection) -> None:
    """Ends after each part, before it begins another."""
    names = request["parts"] or NAMES
    reports.send({"parts": names})
    reports.send({"begin": names[0]})
    reports.send({"end": names[0], "seconds": 0.5, "failure": None})


def endless(request: dict[str, Any], reports: Connection) -> None:
    """Never ends its second part."""
    between(request, reports)
    reports.send({"begin": NAMES[1]})
    while True:
        reports.send({"seconds_per": {}})
        time.sleep(0.1)


def killed(request: dict[str, Any], reports: Connection) -> None:
    """Is killed within its first part."""
    reports.send({"parts": request["parts"] or NAMES})
    reports.send({"begin": NAMES[0]})
    os.kill(os.getpid(), signal.SIGKILL)
