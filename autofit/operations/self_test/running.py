"""Runs the self-test's checks: each by itself, none longer than it may take, all of them kept as they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from autofit import __version__
from autofit.catalog.models import load
from autofit.core.device.probe_findings import findings, slow_formats
from autofit.core.distribution import install
from autofit.core.errors import EnvironmentLacks, in_one_line
from autofit.core.outcome import TimedOut, now
from autofit.core.units import format_duration
from autofit.operations.doctor import libraries
from autofit.operations.self_test import size_checks, technique_checks
from autofit.operations.self_test.device_under_test import EMULATED, DeviceUnderTest, NoTimeLeft
from autofit.operations.self_test.finding import Check, CheckResult, Finding, Report, Verdict
from autofit.probe.shapes import usual_model
from autofit.trial.machine import device_lock
from autofit.trial.machine.detection import version
from autofit.trial.process.group_runner import tell_of_waiting

VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_ALLOC_CONF", "AUTOFIT_NVME_DIR",
)  # fmt: skip
"""Environment variables that change what is measured."""


def checks(kind: str) -> tuple[Check, ...]:
    """All checks for a `kind` of device, the most important first: with too little time, the rest is not run.

    On a processor the checks at real sizes take longest. On an accelerator they take no longer than starting a trial.
    """
    sizes, techniques = (*size_checks.methods(), size_checks.LIMITS), tuple(technique_checks.others())
    return (
        # A probe takes some twelve seconds, and several times that on a busy machine.
        Check(name="probe", shows="The device's rates in each number format.", run=_probe, most_seconds=300.0),
        *technique_checks.precisions(),
        *technique_checks.methods(),
        *((*techniques, *sizes) if kind == "cpu" else (*sizes, *techniques)),
        *technique_checks.slow_ones(),
    )


def _probe(tested: DeviceUnderTest, until: float) -> Finding:
    """The device's rates, and under `EMULATED` a sentence for each number format that is emulated."""
    from autofit.probe.run import run

    seconds = until - time.monotonic()
    if seconds < 15.0:
        raise NoTimeLeft("the time limit was reached")
    devices = device_lock.names(tested.hardware.kind)
    try:
        with device_lock.held(devices, waiting=tell_of_waiting, most_seconds=seconds):
            model = load(usual_model(tested.hardware.kind))
            left = until - time.monotonic()
            probe = run(model, tested.hardware, tested.stack, most_seconds=left, loading_seconds=0.0)
    except device_lock.GivenUp as error:
        raise NoTimeLeft(str(error)) from None
    failed = [part for part in probe.parts if part.failure is not None]
    return Finding(
        verdict=Verdict.FAILED if len(failed) == len(probe.parts) else Verdict.WORKS,
        reason="; ".join(f"{part.name}: {part.failure}" for part in failed),
        figure=" ".join(findings(probe)),
        measured={EMULATED: slow_formats(probe), "probe": probe.to_json()},
    )


def self_test(
    *,
    device: str = "auto",
    ranks: int = 1,
    time_limit_seconds: float = 120.0,
    keep: Callable[[Report], None] = lambda report: None,
    tell: Callable[[CheckResult], None] = lambda result: None,
) -> Report:
    """Run every check here and in place: no store, no Ray.

    `keep` is called before the first check and after each with all that is known; `tell` with each as it ends. Raises
    `EnvironmentLacks` where there is no device to test.
    """
    tested = DeviceUnderTest(device=device, ranks=ranks)
    planned = checks(tested.hardware.kind)
    started = time.monotonic()
    absent = {library.name: library.remedy for library in libraries(tested.hardware, tested.stack) if library.remedy}
    absent |= {} if version("ray") else {"ray": install()}
    report = Report(
        autofit=__version__,
        hardware=tested.hardware,
        stack=tested.stack,
        absent=absent,
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        load_average=os.getloadavg()[0],
        started_at=now(),
        time_limit_seconds=time_limit_seconds,
        seconds=0.0,
        checks=(),
        pending=tuple(check.name for check in planned),
    )
    keep(report)
    tested.start()
    try:
        for check in planned:
            finding = _run(check, tested, started + time_limit_seconds - time.monotonic())
            tested.findings[check.name] = finding
            result = CheckResult(check=check, finding=finding)
            report = replace(
                report,
                seconds=time.monotonic() - started,
                checks=(*report.checks, result),
                pending=report.pending[1:],
            )
            keep(report)
            tell(result)
    finally:
        tested.close()
    return report


def _run(check: Check, tested: DeviceUnderTest, left_seconds: float) -> Finding:
    """The check's finding, with the time that it took. What it waits for has a deadline of its own."""
    started, may_take = time.monotonic(), max(0.0, min(left_seconds, check.most_seconds))
    finding = _answer(check, tested, started + may_take)
    cut = any(isinstance(trial.outcome, TimedOut) for trial in finding.trials)
    if cut and may_take < check.most_seconds:  # which says nothing of the check
        reason = f"cut by the time limit after {format_duration(may_take)}"
        finding = Finding(verdict=Verdict.NOT_RUN, reason=reason, trials=finding.trials)
    return replace(finding, seconds=time.monotonic() - started)


def _answer(check: Check, tested: DeviceUnderTest, until: float) -> Finding:
    try:
        return check.run(tested, until)
    except NoTimeLeft as error:
        return Finding(verdict=Verdict.NOT_RUN, reason=str(error))
    except EnvironmentLacks as error:
        return Finding(verdict=Verdict.REFUSED, reason=error.message, remedy=error.remedy)
    except Exception as error:  # a defect in one check must not cost the others
        return Finding(verdict=Verdict.FAILED, reason=in_one_line(error))
