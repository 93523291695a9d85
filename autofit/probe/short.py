"""The short part of a probe by which devices of one type are compared: arithmetic and memory, in the usual format."""

from __future__ import annotations

import time
from dataclasses import replace

from autofit.catalog.models import load
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import Probe, ProbePart, memory_bound_in, products_in
from autofit.core.errors import EnvironmentLacks
from autofit.probe.run import run
from autofit.probe.shapes import usual_format, usual_model

LOADING_SECONDS = 600.0
"""What loading the libraries may take: 24 s on an H100's machine whose disk had not been read (`probe.run.run`), and
minutes on one whose cores others use, which is what is to be found out."""
MOST_SECONDS = 10.0
"""What both parts may take, without loading the libraries. They took 1.0 s on an H100 and 0.7 s on two cores of a Zen 4
(benchmarks/recorded); a device that needs longer shows what it can until then."""
PAUSES = (5.0, 20.0)
"""Seconds before the rates are measured again where the device was busy or throttled."""


def short_probe(hardware: Hardware, stack: Stack) -> Probe:
    """The rates of this machine's device. If its state leaves doubts, they are measured again after each of `PAUSES`,
    and the better of each counts: what comes and goes, such as a program that starts, makes no device slow. Not on
    a machine on which once takes a minute: a worker must come up in time.

    Raises `EnvironmentLacks` where nothing can be measured."""
    probe = _measured(hardware, stack)
    for pause in PAUSES if probe.doubts and probe.seconds < LOADING_SECONDS / 10 else ():
        time.sleep(pause)
        repeated = _measured(hardware, stack)
        probe = replace(repeated, parts=tuple(_better(part, probe) for part in repeated.parts))
        if not repeated.doubts:
            break
    if not probe.seconds_per:
        why = probe.parts[0].failure
        raise EnvironmentLacks(f"its rates cannot be measured: {why}", remedy="run `autofit probe` there")
    return probe


def _measured(hardware: Hardware, stack: Stack) -> Probe:
    usual = usual_format(hardware)
    return run(
        load(usual_model(hardware.kind)),
        hardware,
        stack,
        parts=(products_in(usual), memory_bound_in(usual)),
        most_seconds=MOST_SECONDS,
        loading_seconds=LOADING_SECONDS,
    )


def _better(part: ProbePart, earlier: Probe) -> ProbePart:
    rates = next((p.seconds_per for p in earlier.parts if p.name == part.name), {})
    both = {**rates, **part.seconds_per}
    return replace(part, seconds_per={kind: min(both[kind], rates.get(kind, both[kind])) for kind in both})
