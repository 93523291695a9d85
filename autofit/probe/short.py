"""The short part of a probe by which devices of one type are compared: arithmetic and memory, in the usual format."""

from __future__ import annotations

from dataclasses import replace

from autofit.catalog.models import load
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import Probe, ProbePart, memory_bound_in, products_in
from autofit.probe.run import run
from autofit.probe.shapes import usual_format, usual_model

MOST_SECONDS = 10.0
"""Of both parts, beside loading the libraries. They took 1.0 s on an H100 and 0.7 s on two cores of a Zen 4
(benchmarks/recorded); a device that needs longer shows what it can until then."""


def short_probe(hardware: Hardware, stack: Stack) -> Probe:
    """The rates of this machine's device. If something else used it meanwhile, they are measured once more, and the
    better of each counts: what comes and goes, such as a program that starts, makes no device slow. Raises
    `EnvironmentLacks` where nothing can be measured."""
    model, usual = load(usual_model(hardware.kind)), usual_format(hardware)
    parts = products_in(usual), memory_bound_in(usual)
    made = run(model, hardware, stack, parts=parts, most_seconds=MOST_SECONDS)
    if not made.doubts:
        return made
    again = run(model, hardware, stack, parts=parts, most_seconds=MOST_SECONDS)
    return replace(again, parts=tuple(_better(part, made) for part in again.parts))


def _better(part: ProbePart, earlier: Probe) -> ProbePart:
    rates = next((there.seconds_per for there in earlier.parts if there.name == part.name), {})
    both = {**rates, **part.seconds_per}
    return replace(part, seconds_per={kind: min(both[kind], rates.get(kind, both[kind])) for kind in both})
