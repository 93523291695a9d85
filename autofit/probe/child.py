"""The process that probes a device: part after part, each reported as it ends, so that none can spoil another."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from autofit.catalog.models import Model
from autofit.core.device.probe import BETWEEN_RANKS, CONTEXT, MeasuredStep
from autofit.core.hardware import Hardware, Stack
from autofit.core.workload import Workload
from autofit.techniques import Job
from autofit.trial.machine import nvml

TRANSFERS, KERNELS, ON_HOST, BESIDE = "transfers", "attention kernels", "updates on the host", "context"
FIGURES = (TRANSFERS, KERNELS, ON_HOST, BETWEEN_RANKS, BESIDE)
"""The parts whose figures are no rates of a kind of work."""

Found = Iterator[dict[str, float] | MeasuredStep]


class Prober:
    """Runs the parts of a probe by their names."""

    def __init__(self, request: dict[str, Any], reports: Connection) -> None:
        import torch

        from autofit.probe.bench import FORMATS, Bench
        from autofit.trial.limits.threads import threads_per_rank, use_threads

        hardware = Hardware.from_json(request["hardware"])
        use_threads(threads_per_rank(hardware, None))
        torch.manual_seed(0)
        self._reports = reports
        self._environments: list[dict[str, str]] = request["environments"]
        """Of each rank of a trial of several: which device is its own."""
        self._seconds_per: dict[str, float] = dict(request["seconds_per"])
        before = nvml.visible(0)
        self._held_by_others = 0 if before is None else before.held_bytes
        self._bench = Bench(torch.device(hardware.kind))
        self._shapes = request["shapes"]
        self._job = _job(request["model"], hardware, request["stack"])
        self._parts: dict[str, Callable[[], Found]] = {}
        for name in FORMATS:
            self._parts |= self._of_format(name)
        self._parts |= self._others()

    def _of_format(self, name: str) -> dict[str, Callable[[], Found]]:
        from autofit.probe import memory_bound, products

        return {
            f"products in {name}": partial(products.measure, self._bench, self._shapes, name),
            f"memory-bound operations in {name}": partial(memory_bound.measure, self._bench, self._shapes, name),
            f"attention in {name}": partial(memory_bound.measure_attention, self._bench, self._shapes, name),
        }

    def _others(self) -> dict[str, Callable[[], Found]]:
        from autofit.probe import kernels, memory_bound, ranks, transfers, updates

        pages: dict[str, Callable[[], Found]] = {
            "new pages": partial(memory_bound.measure_pages, self._bench, self._shapes)
        }
        of_accelerators: dict[str, Callable[[], Found]] = {
            TRANSFERS: partial(transfers.measure, self._bench),
            KERNELS: partial(kernels.measure, self._bench, self._shapes),
            ON_HOST: updates.measure_on_host,
        }
        of_ranks: dict[str, Callable[[], Found]] = {
            BETWEEN_RANKS: partial(ranks.measure, self._bench, self._environments)
        }
        return {
            **(of_accelerators if self._bench.accelerator else pages),
            "updates": partial(updates.measure, self._bench, self._shapes),
            "quantisation": partial(updates.measure_quantised, self._bench, self._shapes),
            **(of_ranks if self._environments else {}),
            "launches": self._launches,
            "real step": self._real_step,
            **({BESIDE: self._context} if self._bench.device.type == "cuda" else {}),
        }

    def _launches(self) -> Found:
        from autofit.probe import launches

        return launches.measure(self._bench, self._job)

    def _context(self) -> Found:
        from autofit.trial.measure.meter import beside_allocator

        yield {CONTEXT: float(beside_allocator(self._held_by_others))}

    def _real_step(self) -> Found:
        from autofit.probe import real_step

        return real_step.measure(self._bench, self._job, real_step.config_for(self._seconds_per))

    @property
    def names(self) -> list[str]:
        """The parts, in order."""
        return list(self._parts)

    def run(self, name: str) -> None:
        """One part: an error is reported as its failure."""
        started = time.monotonic()
        self._reports.send({"begin": name})
        failure = None
        try:
            for found in self._parts[name]():
                if isinstance(found, MeasuredStep):
                    self._reports.send({"step": asdict(found)})
                elif name in FIGURES:
                    self._reports.send({"figures": found})
                else:
                    self._seconds_per |= found
                    self._reports.send({"seconds_per": found})
        except Exception as error:
            failure = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
            self._recover(failure)
        self._reports.send({"end": name, "seconds": time.monotonic() - started, "failure": failure})

    def _recover(self, failure: str) -> None:
        """Free what the failed part held. Where the device answers no more, this process ends within the part, its last
        words the reason: the other parts are left to a new one."""
        import gc

        gc.collect()
        if self._bench.accelerator:
            try:
                self._bench.wait()
                self._bench.empty()
            except Exception:
                print(failure, file=sys.stderr, flush=True)
                os._exit(1)


def _job(model: Model, hardware: Hardware, stack: Stack) -> Job:
    from autofit.probe.real_step import TOKENS

    tokens = TOKENS[hardware.kind != "cpu"]
    workload = Workload(model=model.name, model_digest=model.digest, seq_len=tokens, global_batch=1)
    return Job(model=model, workload=workload, hardware=hardware, stack=stack)


def probe(request: dict[str, Any], reports: Connection) -> None:
    """The parts that are asked for, or every one there is."""
    prober = Prober(request, reports)
    names = request["parts"] or prober.names
    reports.send({"parts": names})
    for name in names:
        prober.run(name)
