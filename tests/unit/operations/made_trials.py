"""Hand-made trials of a job that is never run: a model of the catalog on a card that need not be there."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import Probe, ProbePart
from autofit.core.device.state import DeviceState
from autofit.core.lattice import Config
from autofit.core.outcome import Crashed, Fits, Measurement, Outcome, OutOfMemory, StepSeconds, Trial
from autofit.core.prediction import Prediction, StepWork
from autofit.core.units import GIB
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.operations import WorkloadOptions
from autofit.store import Store
from autofit.techniques import Job, complete

MODEL = "smollm2-135m"
OPTIONS = WorkloadOptions(model=MODEL, seq_len=128, global_batch=4)
HARDWARE = Hardware(
    name="h100-80g",
    kind="cuda",
    device_name="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * GIB,
    host_memory_bytes=512 * GIB,
    capability="9.0",
    peak_flops=989.4e12,
)
STACK = Stack(python="3.11", torch="2.13.0", transformers="5.23.0", peft="0.21.2", bitsandbytes="0.50.0")
WORK = StepWork(
    amounts={"product/bf16/nt": 1e15, "elementwise/bf16/far": 1e11, "launch": 1e4}, estimator=ESTIMATOR_VERSION
)
"""Of a prediction by this version of the estimator."""
OLDER = replace(WORK, estimator=ESTIMATOR_VERSION - 1)

_SECONDS = itertools.count()


def make_job(options: WorkloadOptions = OPTIONS, *, hardware: Hardware = HARDWARE, stack: Stack = STACK) -> Job:
    """The job that the trials belong to."""
    return options.job((hardware, stack))


def fits(gib: float, tokens_per_second: float, *, allocated: float | None = None, tokens: int = 512) -> Fits:
    """The outcome of a trial that fits, with its device memory and its peak of allocated memory in GiB."""
    device = int(gib * GIB)
    peak = int((allocated if allocated is not None else 0.9 * gib) * GIB)
    median = tokens / tokens_per_second
    return Fits(
        measurement=Measurement(
            tokens_per_second=float(tokens_per_second),
            step_seconds=StepSeconds(median=median, p95=1.02 * median, relative_spread=0.03),
            mfu=0.4,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=max(peak, device - 1),
            device_bytes=device,
            host_peak_bytes=3 * GIB,
            host_baseline_bytes=GIB,
            phase_peaks={"forward": peak // 2, "backward": peak, "optimizer": peak // 3},
            losses=(10.8, 10.5, 10.1),
            reference_loss=10.8,
            steps=5,
            setup_seconds=3.0,
            overhead_seconds=0.2,
        )
    )


def out_of_memory() -> OutOfMemory:
    """An allocation that failed."""
    return OutOfMemory(reason="tried to allocate 2.00 GiB", phase="backward", requested_bytes=2 * GIB)


def crashed() -> Crashed:
    """A trial that ended by a signal."""
    return Crashed(reason="killed by SIGSEGV", signal="SIGSEGV", exit_code=-11, stderr_tail="Segmentation fault")


def make_prediction(gib: float = 1.0, *, seconds: float | None = 1.0, work: StepWork | None = WORK) -> Prediction:
    """A prediction of so much memory and of a step's time, by data sheets alone."""
    return Prediction(
        peak_allocated_bytes=int(gib * GIB),
        device_bytes=int(gib * GIB),
        step_seconds=seconds,
        calibrated_on=0,
        relative_error=None if seconds is None else 0.5,
        work=work,
    )


def make_probe(*parts: ProbePart, state: DeviceState | None = None) -> Probe:
    """A probe of the card that has measured these parts."""
    return Probe(
        hardware=HARDWARE,
        stack=STACK,
        model=MODEL,
        shapes_key="0" * 16,
        parts=parts,
        steps=(),
        seconds=1.0,
        recorded_at="2026-03-01T00:00:00+00:00",
        device_state=state,
    )


def make_trial(
    values: dict[str, object] | Config, outcome: Outcome, *, job: Job | None = None, limit: int = 80 * GIB
) -> Trial:
    """A trial of the config given by `values`, completed by the plain recipe."""
    job = job or make_job()
    second = next(_SECONDS)
    return Trial(
        config=values if isinstance(values, Config) else complete(values),
        workload=job.workload,
        hardware=job.hardware,
        stack=job.stack,
        memory_limit_bytes=limit,
        outcome=outcome,
        seconds=7.5,
        recorded_at=f"2026-03-01T{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}+00:00",
    )


MADE: tuple[tuple[dict[str, object], Outcome], ...] = (
    ({"method": "full", "micro_batch": 1, "checkpointing": "full"}, fits(10, 1000)),
    ({"method": "full", "micro_batch": 2}, fits(20, 2000)),
    ({"method": "full", "micro_batch": 2, "attention": "eager"}, fits(24, 1900)),
    ({"method": "full", "micro_batch": 4, "attention": "eager"}, out_of_memory()),
    ({"method": "full", "micro_batch": 4, "precision": "bf16"}, fits(40, 4000)),
    ({"method": "full", "micro_batch": 4, "precision": "bf16", "attention": "eager"}, crashed()),
    ({"method": "lora", "micro_batch": 4}, fits(8, 2600)),
    ({"method": "lora", "micro_batch": 1, "checkpointing": "full"}, fits(3, 900)),
    ({"method": "lora", "micro_batch": 4, "rank": 64}, fits(9, 2500)),
    ({"method": "qlora", "micro_batch": 1, "checkpointing": "full"}, fits(2, 700)),
)
"""Two frontiers and one point: full at 10, 20 and 40 GiB, LoRA at 3 and 8, QLoRA at 2; also two
that others dominate, one out of memory and one crash."""


def fill(store: Store, made: Any = MADE, *, job: Job | None = None) -> list[Trial]:
    """Add the trials to a store; returns them with their ids."""
    return [store.add(make_trial(values, outcome, job=job)) for values, outcome in made]
