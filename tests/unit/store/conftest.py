"""An empty store of each kind, and trials to put in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import MeasuredStep, Probe, ProbePart
from autofit.core.device.state import CardState, DeviceState
from autofit.core.lattice import Config
from autofit.core.outcome import (
    Crashed,
    Diverged,
    Fits,
    Measurement,
    Outcome,
    OutOfMemory,
    StepSeconds,
    TimedOut,
    Trial,
    Unsupported,
    context_keys,
)
from autofit.core.prediction import Prediction
from autofit.core.workload import Workload
from autofit.store import Store

HARDWARE = Hardware(
    name="h100-80g",
    kind="cuda",
    device_name="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * 2**30,
    capability="9.0",
    peak_flops=989.4e12,
)
OTHER_HARDWARE = replace(HARDWARE, count=8, host_memory_bytes=2**40)
"""Hardware with the same key, differing only where neither memory nor speed is affected."""
STACK = Stack(python="3.11.9", torch="2.13.0", transformers="5.23.0", peft="0.21.2", cuda="13.0")
WORKLOAD = Workload(model="llama-3.1-8b", model_digest="0123456789abcdef", lora_dropout=0.05)
CONFIG = Config.of({"method": "lora", "rank": 16, "micro_batch": 1, "compile": False, "precision": "bf16-mixed"})

OUTCOMES: tuple[Outcome, ...] = (
    OutOfMemory(reason="tried to allocate 2 GiB", phase="backward", requested_bytes=2**31, host=False),
    TimedOut(reason="no end within 60 s", deadline_seconds=60.0, phase="forward"),
    Crashed(reason="SIGSEGV", signal="SIGSEGV", exit_code=-11, stderr_tail="naïve \0 \N{SNOWMAN}\n"),
    Diverged(reason="loss is not finite", losses=(11.5, None), reference_loss=11.5),
    Unsupported(reason="flash attention needs compute capability 8.0"),
)

PREDICTION = Prediction(
    peak_allocated_bytes=19 * 2**30 + 1,
    peak_reserved_bytes=20 * 2**30 + 7,
    device_bytes=21 * 2**30,
    step_seconds=0.1 + 0.2,
    calibrated_on=5,
    relative_error=None,
)

SHARED = DeviceState(seconds=3.25, cards=(CardState(uuid="GPU-a", others_share=0.45),))
"""Of a trial beside another process."""


def a_probe(**changes: Any) -> Probe:
    """A probe of the hardware and stack of `a_trial`."""
    trial = a_trial()
    part = ProbePart(name="products in fp32", seconds=0.1 + 0.2, seconds_per={"product/fp32/nt": 1e-11})
    step = MeasuredStep(config={"method": "lora"}, layers=2, seconds=0.6, work=None)
    values: dict[str, Any] = {
        "hardware": trial.hardware,
        "stack": trial.stack,
        "model": "llama-3.1-8b",
        "shapes_key": "0" * 16,
        "parts": (part, ProbePart(name="attention in fp16", seconds=1.0, failure="RuntimeError: not implemented")),
        "steps": (step,),
        "seconds": 9.5,
        "recorded_at": "2026-01-01T00:00:00+00:00",
    }
    return Probe(**{**values, **changes})


_NUMBERS = itertools.count(1)


def measured(tokens_per_second: float = 1234.5678901234567, device_bytes: int = 20 * 2**30) -> Fits:
    """A fitting outcome."""
    return Fits(
        measurement=Measurement(
            tokens_per_second=tokens_per_second,
            step_seconds=StepSeconds(median=0.1, p95=0.11, relative_spread=0.02),
            mfu=0.41,
            peak_allocated_bytes=device_bytes - 3,
            peak_reserved_bytes=device_bytes - 2,
            device_bytes=device_bytes,
            host_peak_bytes=2**31,
            host_baseline_bytes=2**30,
            phase_peaks={"forward": 1, "backward": 2, "optimizer": 3},
            losses=(11.5, 11.25, 1e-7),
            reference_loss=11.5,
            steps=7,
            setup_seconds=2.5,
            overhead_seconds=0.25,
        )
    )


def a_trial(
    *,
    config: Config = CONFIG,
    workload: Workload = WORKLOAD,
    hardware: Hardware = HARDWARE,
    stack: Stack = STACK,
    memory_limit_bytes: int = 80 * 2**30,
    outcome: Outcome | None = None,
    seconds: float = 12.25,
    recorded_at: str | None = None,
    prediction: Prediction | None = None,
    device_state: DeviceState | None = None,
) -> Trial:
    """A trial, recorded at a time of its own unless one is given."""
    number = next(_NUMBERS)
    return Trial(
        config=config,
        workload=workload,
        hardware=hardware,
        stack=stack,
        memory_limit_bytes=memory_limit_bytes,
        outcome=measured() if outcome is None else outcome,
        seconds=seconds,
        recorded_at=recorded_at or f"2026-01-01T{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}Z",
        prediction=prediction,
        device_state=device_state,
    )


def context(trial: Trial) -> dict[str, str]:
    """The keys of a trial's hardware, stack and workload, as the store's methods take them."""
    return context_keys(trial.hardware, trial.stack, trial.workload)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """An empty store, of each kind in turn."""
    with Store.open(url) as opened:
        yield opened
