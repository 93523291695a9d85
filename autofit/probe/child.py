"""The process that probes a device: part after part, each reported as it ends, so that none can spoil another."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from autofit.core.device.probe import BETWEEN_RANKS, CONTEXT, MeasuredStep, ProbePart, memory_bound_in, products_in
from autofit.core.errors import in_one_line
from autofit.probe.shapes import usual_format
from autofit.trial.machine import nvml

if TYPE_CHECKING:
    from autofit.probe.bench import Bench

TRANSFERS, ON_HOST, CONTEXT_PART = "transfers", "updates on the host", "context"
FIGURES = (TRANSFERS, ON_HOST, BETWEEN_RANKS, CONTEXT_PART)
"""The parts whose figures are no rates of a kind of work."""

Results = Iterator[dict[str, float] | MeasuredStep]
Part = Callable[[], Results]


def probe(request: dict[str, Any], reports: Connection) -> None:
    """Measure the parts that are asked for, or every one there is. An error in a part is its failure.

    Reported are first the names of the parts; then of each part what has been measured of it, at its beginning, after
    each measurement and at its end, and None once it has ended; and beside that the steps of the model.
    """
    import torch

    from autofit.probe.bench import Bench
    from autofit.trial.machine.cores import threads_per_rank, use_threads

    hardware = request["job"].hardware
    use_threads(threads_per_rank(hardware, None))
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # as in trials of fp32, whatever the environment says
    before = nvml.held_bytes() or 0
    bench, rates = Bench(torch.device(hardware.kind)), dict(request["seconds_per"])
    parts = _parts(bench, request, rates, before)
    names = request["parts"] or list(parts)
    reports.send(names)
    for name in names:
        started, failure = time.monotonic(), None
        part = ProbePart(name=name, seconds=0.0)
        reports.send(part)
        try:
            for result in parts[name]():
                if isinstance(result, MeasuredStep):
                    reports.send(result)
                    continue
                if name in FIGURES:
                    part = replace(part, figures={**part.figures, **result})
                else:
                    rates |= result
                    part = replace(part, seconds_per={**part.seconds_per, **result})
                reports.send(part)
        except Exception as error:
            failure = in_one_line(error)[:300]
            _recover(bench, failure)
        reports.send(replace(part, seconds=time.monotonic() - started, failure=failure))
        reports.send(None)


def _parts(bench: Bench, request: dict[str, Any], rates: Mapping[str, float], held_by_others: int) -> dict[str, Part]:
    """Every part by its name, in order; `rates` are those of all parts that have ended. They begin with what is mostly
    trained in there, for the time may be over before the last."""
    from autofit.probe import memory_bound, products, ranks, updates
    from autofit.probe.bench import FORMATS

    job, shapes, environments = request["job"], request["shapes"], request["environments"]
    parts: dict[str, Part] = {}
    for name in sorted(FORMATS, key=usual_format(job.hardware).__ne__):
        parts[products_in(name)] = partial(products.measure, bench, shapes, name)
        parts[memory_bound_in(name)] = partial(memory_bound.measure, bench, shapes, name)
        parts[f"attention in {name}"] = partial(memory_bound.measure_attention, bench, shapes, name)
    if bench.accelerator:
        parts[TRANSFERS] = partial(updates.measure_transfers, bench)
        parts[ON_HOST] = updates.measure_on_host
    else:
        parts["new pages"] = partial(memory_bound.measure_pages, bench)
    parts["updates"] = partial(updates.measure, bench)
    parts["quantisation"] = partial(updates.measure_quantised, bench, shapes)
    if environments:
        parts[BETWEEN_RANKS] = partial(ranks.measure, bench, environments)

    def launching() -> Results:
        from autofit.probe import launches

        return launches.measure(bench, job)

    def real() -> Results:
        from autofit.probe import real_step

        return real_step.measure(bench, job, real_step.configs_for(rates, accelerator=bench.accelerator))

    def context() -> Results:
        from autofit.trial.measure.meter import beside_allocator

        yield {CONTEXT: float(beside_allocator(held_by_others))}

    parts |= {"launches": launching, "real step": real}
    return parts | {CONTEXT_PART: context} if bench.device.type == "cuda" else parts


def _recover(bench: Bench, failure: str) -> None:
    """Free what the failed part held. Where the device answers no more, this process ends within the part, its last
    words the reason: the other parts are left to a new one."""
    import gc

    gc.collect()
    if bench.accelerator:
        try:
            bench.wait()
            bench.empty()
        except Exception:
            print(failure, file=sys.stderr, flush=True)
            os._exit(1)
