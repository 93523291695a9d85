"""Runs a probe in a process of its own, which is killed if it hangs; what is left is then done by another."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autofit.catalog.models import Model, shape
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import OUT_OF_TIME, MeasuredStep, Probe, ProbePart, shapes_key
from autofit.core.errors import EnvironmentLacks, lines_of
from autofit.core.outcome import now
from autofit.core.workload import Workload
from autofit.estimate.warm import context
from autofit.probe import child
from autofit.probe.shapes import Shapes
from autofit.techniques import Job
from autofit.trial.machine import nvml
from autofit.trial.machine.watch import DeviceWatch
from autofit.trial.measure.process_memory import prefer_as_oom_victim
from autofit.trial.process.child_process import KILL_SECONDS, die_with_parent
from autofit.trial.process.runner import trial_environment

Child = Callable[[dict[str, Any], Connection], None]
"""Does what a request asks for, and reports it."""


def run(
    model: Model,
    hardware: Hardware,
    stack: Stack,
    *,
    parts: Sequence[str] = (),
    known: Probe | None = None,
    ranks: int = 1,
    child: Child = child.probe,
    silent_seconds: float = 30.0,
    most_seconds: float = math.inf,
    loading_seconds: float = 30.0,
) -> Probe:
    """Probe `hardware`, which is this machine's device, at the shapes of `model`: all of it, or only these `parts`, the
    others being `known`; and what happens between `ranks`, if these are several. `child` does it, in a process forked
    by the server from which estimating processes come.

    A part that fails, ends its process or reports nothing for `silent_seconds` (a single measurement takes a fraction
    of one) is reported as failed, and the others go on. `most_seconds` after the first began, what is left counts as
    failed, too. Loading the libraries before that may take `loading_seconds` more: on an H100's machine, whose disk had
    not been read, it took 24 s of the 30 s that were given to all.
    Raises `EnvironmentLacks` if not even the first can begin.
    """
    started = time.monotonic()
    until = started + most_seconds + loading_seconds
    # The real step chooses its own length.
    workload = Workload(model=model.name, model_digest=model.digest, seq_len=2, global_batch=1)
    # Until its first part the process imports, which takes a busy machine three minutes.
    progress = _Progress(child, max(180.0, loading_seconds), silent_seconds, most_seconds, until, list(parts) or None)
    while progress.left is None or progress.left:
        request = {
            "job": Job(model=model, workload=workload, hardware=hardware, stack=stack),
            "shapes": Shapes.of(shape(model)),
            "parts": progress.left,
            "environments": [trial_environment(hardware.kind, rank) for rank in range(ranks)] if ranks > 1 else [],
            "seconds_per": {**(known.seconds_per if known is not None else {}), **progress.seconds_per},
        }
        progress.follow(request, hardware)
    return Probe(
        hardware=hardware,
        stack=stack,
        model=model.name,
        shapes_key=shapes_key(model.digest),
        parts=tuple(progress.parts),
        steps=tuple(progress.steps),
        seconds=time.monotonic() - started,
        recorded_at=now(),
        device_state=None if progress.watch is None else progress.watch.state(),
    )


@dataclass(slots=True)
class _Progress:
    """What the processes have reported so far."""

    child: Child
    silent_while_loading: float
    """Seconds without an event before the first part after which a process is given up."""
    silent_seconds: float
    """Seconds without an event after which a process is given up, from the first part on."""
    most_seconds: float
    """From the beginning of the first part on."""
    until: float
    """When the time is over, monotonic: at the latest, until the first part begins."""
    left: list[str] | None = None
    """Parts that have not ended; None until it is known which there are."""
    parts: list[ProbePart] = field(default_factory=list)
    steps: list[MeasuredStep] = field(default_factory=list)
    watch: DeviceWatch | None = None
    """Observes the device from the first part to the last, or until the process ends."""
    _process: int = 0
    _held_bytes: int | None = None
    """What others held of the device's memory before the process began."""
    _part: ProbePart | None = None
    """What is known of the part under way."""
    _began: float = 0.0

    @property
    def seconds_per(self) -> dict[str, float]:
        """The rates of all parts that have ended."""
        return {kind: rate for part in self.parts for kind, rate in part.seconds_per.items()}

    def follow(self, request: dict[str, Any], hardware: Hardware) -> None:
        """Start a process and note what it reports until it ends or hangs."""
        ended_before = len(self.parts)
        reading, writing = context().Pipe(duplex=False)
        with tempfile.NamedTemporaryFile() as output:
            arguments = (self.child, request, writing, output.name, trial_environment(hardware.kind))
            self._held_bytes = None if hardware.kind == "cpu" else nvml.held_bytes()
            process = context().Process(target=_run, args=arguments)
            process.start()
            assert process.pid is not None
            self._process, self.watch = process.pid, None
            writing.close()
            try:
                why = self._listen(reading, hardware)
                if why is None:
                    process.join(2.0)  # it has said all
                    if process.exitcode == -signal.SIGKILL:
                        why = "it was killed, as the kernel does where the host is out of memory"
            finally:
                if self.left and self.watch is not None and process.is_alive():
                    self.watch.end()
                elif self.left:
                    self.watch = None  # what a process that is gone has used is unknown
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join(KILL_SECONDS)
                reading.close()
            if process.is_alive():
                raise EnvironmentLacks(
                    "the device cannot be probed: its driver does not let a killed process end",
                    remedy="check nvidia-smi, and dmesg for Xid errors; it may take a reset or a reboot",
                )
            lines = lines_of(Path(output.name).read_text(errors="replace"), "it said nothing")
            self._ended(why or lines[-1][:300], ended_before)

    def _listen(self, reading: Connection, hardware: Hardware) -> str | None:
        """Note events until the pipe closes; why it was given up, or None."""
        limit = self.silent_while_loading
        while reading.poll(max(0.0, min(limit, self.until - time.monotonic()))):
            try:
                self._note(reading.recv())
            except EOFError:
                return None
            if self._part is not None:
                limit = self.silent_seconds
            self.watch = self.watch or DeviceWatch(hardware, self._process, self._held_bytes)
            if self.left:
                self.watch.follow(False)
            else:
                self.watch.end()
        return OUT_OF_TIME if time.monotonic() >= self.until else f"nothing was heard of it for {limit:.0f} s"

    def _note(self, report: list[str] | ProbePart | MeasuredStep | None) -> None:
        if isinstance(report, list):
            self.left = list(report)
        elif isinstance(report, MeasuredStep):
            self.steps.append(report)
        elif report is None:
            self._close()
        else:
            if self._part is None:
                self._began = time.monotonic()
                self.until = min(self.until, self._began + self.most_seconds)
            self._part = report

    def _close(self) -> None:
        assert self._part is not None and self.left is not None
        self.left.remove(self._part.name)
        self.parts.append(self._part)
        self._part = None

    def _ended(self, why: str, ended_before: int) -> None:
        """The process has ended: if within a part, that part has failed."""
        if self._part is not None:
            seconds = time.monotonic() - self._began
            self._part = replace(self._part, seconds=seconds, failure=f"its process ended: {why}")
            self._close()
        if why == OUT_OF_TIME and self.left is not None:
            self.parts += [ProbePart(name=name, seconds=0.0, failure=why) for name in self.left]
            self.left = []
        elif (self.left is None or self.left) and len(self.parts) == ended_before:
            raise EnvironmentLacks(
                f"the device cannot be probed: {why}", remedy="run `autofit doctor`, which says what is missing"
            )


def _run(child: Child, request: dict[str, Any], reports: Connection, output: str, environment: dict[str, str]) -> None:
    """In the new process: a session of its own, whose output goes to a file, and which ends with its parent."""
    die_with_parent()
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(environment)
    prefer_as_oom_victim()
    child(request, reports)
