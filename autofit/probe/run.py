"""Runs a probe in a process of its own, which is killed if it hangs; what is left is then done by another."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from autofit.catalog.models import Model, shape
from autofit.device_probe import MeasuredStep, Probe, ProbePart, shapes_key
from autofit.errors import EnvironmentLacks
from autofit.hardware import Hardware, Stack
from autofit.outcome import now
from autofit.probe.shapes import Shapes
from autofit.trial.runner import trial_environment

START_SECONDS = 180.0
"""How long the process may take until its first part: the imports of a busy machine."""
SILENT_SECONDS = 30.0
"""How long it may then report nothing. A single measurement takes a fraction of a second."""


def run(
    model: Model,
    hardware: Hardware,
    stack: Stack,
    *,
    parts: Sequence[str] = (),
    child: str = "autofit.probe.child",
    silent_seconds: float = SILENT_SECONDS,
) -> Probe:
    """Probe `hardware`, which is this machine's device, at the shapes of `model`: all of it, or only these `parts`.
    `child` is the module that does it.

    A part that fails, hangs or ends its process is reported as failed, and the others go on. Raises `EnvironmentLacks`
    if not even the first can begin.
    """
    started = time.monotonic()
    progress = _Progress(child, silent_seconds, list(parts) or None)
    while progress.left is None or progress.left:
        request = {
            "model": model.to_json(),
            "hardware": hardware.to_json(),
            "stack": stack.to_json(),
            "shapes": Shapes.of(shape(model)).to_json(),
            "parts": progress.left,
            "seconds_per": progress.seconds_per,
        }
        progress.follow(request, hardware.kind)
    return Probe(
        hardware=hardware,
        stack=stack,
        model=model.name,
        shapes_key=shapes_key(model.digest),
        parts=tuple(progress.parts),
        steps=tuple(progress.steps),
        seconds=time.monotonic() - started,
        recorded_at=now(),
    )


@dataclass(slots=True)
class _Progress:
    """What the processes have reported so far."""

    child: str
    silent_seconds: float
    left: list[str] | None = None
    """Parts that have not ended; None until it is known which there are."""
    parts: list[ProbePart] = field(default_factory=list)
    steps: list[MeasuredStep] = field(default_factory=list)
    _now: str | None = None
    """The part under way."""
    _began: float = 0.0
    _found: dict[str, float] = field(default_factory=dict)
    """Its rates so far."""
    _figures: dict[str, float] = field(default_factory=dict)

    @property
    def seconds_per(self) -> dict[str, float]:
        """The rates of all parts that have ended."""
        return {kind: rate for part in self.parts for kind, rate in part.seconds_per.items()}

    def follow(self, request: dict[str, Any], kind: str) -> None:
        """Start a process and note what it reports until it ends or hangs."""
        reading, writing = os.pipe()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [sys.executable, "-m", self.child, str(writing)],
                env=trial_environment(kind),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(writing,),
                start_new_session=True,
            )
            os.close(writing)
            try:
                _give(process.stdin, request)
                why = self._listen(reading)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                os.close(reading)
            self._ended(why or _last_line(output))

    def _listen(self, reading: int) -> str | None:
        """Note events until the pipe closes; why it was given up, or None."""
        pending = b""
        limit = START_SECONDS
        while True:
            ready, _, _ = select.select([reading], [], [], limit)
            if not ready:
                return f"nothing was heard of it for {limit:.0f} s"
            chunk = os.read(reading, 65536)
            if not chunk:
                return None
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._note(json.loads(line))
            if self._now is not None:
                limit = self.silent_seconds

    def _note(self, event: dict[str, Any]) -> None:
        if "parts" in event:
            self.left = list(event["parts"])
        elif "begin" in event:
            self._now, self._began = event["begin"], time.monotonic()
        elif "seconds_per" in event:
            self._found |= event["seconds_per"]
        elif "figures" in event:
            self._figures |= event["figures"]
        elif "step" in event:
            self.steps.append(MeasuredStep.from_json(event["step"]))
        elif "end" in event:
            self._close(event["seconds"], event["failure"])

    def _close(self, seconds: float, failure: str | None) -> None:
        assert self._now is not None and self.left is not None
        self.left.remove(self._now)
        part = ProbePart(
            name=self._now, seconds=seconds, seconds_per=self._found, figures=self._figures, failure=failure
        )
        self.parts.append(part)
        self._now, self._found, self._figures = None, {}, {}

    def _ended(self, why: str) -> None:
        """The process has ended: if within a part, that part has failed."""
        if self._now is not None:
            self._close(time.monotonic() - self._began, f"its process ended: {why}")
        elif self.left is None or self.left:
            raise EnvironmentLacks(
                f"the device cannot be probed: {why}", remedy="run `autofit doctor`, which says what is missing"
            )


def _give(pipe: IO[bytes] | None, request: dict[str, Any]) -> None:
    assert pipe is not None
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(json.dumps(request).encode())


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"
