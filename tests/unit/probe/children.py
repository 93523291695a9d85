"""Stands in for what a process does that probes a device."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from autofit.core.device.probe import ProbePart

NAMES = ["first", "hangs", "dies", "fails", "last"]


def probe(request: dict[str, Any], reports: Connection) -> None:
    """Reports the parts that it is asked for; one of them hangs and one ends the process."""
    names = request["parts"] or NAMES
    reports.send(names)
    for name in names:
        part = ProbePart(name=name, seconds=0.5, seconds_per={f"launch/{name}": 1.0})
        reports.send(part)
        if name == "hangs":
            time.sleep(3600)
        if name == "dies":
            print("the driver has gone away", flush=True)
            os._exit(7)
        reports.send(replace(part, failure="RuntimeError: no such kernel" if name == "fails" else None))
        reports.send(None)


def absent(request: dict[str, Any], reports: Connection) -> None:
    """Cannot even begin."""
    raise ImportError("No module named 'torch'")


def between(request: dict[str, Any], reports: Connection) -> None:
    """Ends after each part, before it begins another."""
    names = request["parts"] or NAMES
    reports.send(names)
    reports.send(ProbePart(name=names[0], seconds=0.5))
    reports.send(None)


def endless(request: dict[str, Any], reports: Connection) -> None:
    """Never ends its second part."""
    between(request, reports)
    while True:
        reports.send(ProbePart(name=NAMES[1], seconds=0.0))
        time.sleep(0.1)


def killed(request: dict[str, Any], reports: Connection) -> None:
    """Is killed within its first part."""
    reports.send(request["parts"] or NAMES)
    reports.send(ProbePart(name=NAMES[0], seconds=0.0))
    os.kill(os.getpid(), signal.SIGKILL)
