"""The child's side of a user's program: starts it, passes on what it reports, ends it with all that it has started."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autofit.core.errors import lines_of
from autofit.core.outcome import Crashed, Outcome, Unsupported
from autofit.core.units import GIB
from autofit.trial.machine import nvml
from autofit.trial.machine.cores import threads_per_rank
from autofit.trial.measure import process_memory
from autofit.trial.process import classify
from autofit.trial.process.child_process import adopt_orphans, die_with_parent, end_orphans, tail
from autofit.trial.process.events import Event, EventPipe
from autofit.trial.program.command import Command, source_of
from autofit.trial.program.environment import of_program
from autofit.trial.request import TrialRequest

BEFORE_LIMIT_BYTES = 4 * GIB
"""Address space beyond the limit that a program on a processor may take until it reports, and the limit is enforced:
torch, transformers and thread pools map 1.5 GiB on 2 cores, of which they touch a quarter."""
_FATAL_SIGNALS = ("SIGILL", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGSEGV", "SIGTERM")
"""Signals whose negative a launcher exits with. Those below are left out: a program's own `exit(-1)` is no SIGHUP."""
_SIGNALS_BY_STATUS = {
    **{128 + number: -number for number in signal.Signals},
    **{256 - signal.Signals[name]: -signal.Signals[name] for name in _FATAL_SIGNALS},
}
"""The exit status by which shells and launchers report a signal that ended their program -> minus that signal's
number."""


def run_program(request: TrialRequest, events: EventPipe, *, asked_at: float) -> Outcome:
    """Run the workload's program for the config, until it has reported an outcome or has ended. Raises `UsageError` for
    a command that no longer exists as it was."""
    on_cpu = request.job.hardware.kind == "cpu"
    held_bytes = None if on_cpu else nvml.held_bytes()
    events.enter(classify.LAUNCH)
    address = f"autofit-trial-{secrets.token_hex(16)}"
    adopt_orphans()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        kills_before = classify.kernel_oom_kills()
        try:
            process = _start_program(request, address)
        except OSError as error:
            return Unsupported(reason=f"the program cannot be started: {error}")
        greeting = {
            "request": request.to_json(),
            "asked_at": asked_at,
            "started_at": time.monotonic(),
            "held_bytes": held_bytes,
        }
        relay = _Relay(events=events, greeting=(json.dumps(greeting) + "\n").encode())
        try:
            outcome = relay.follow(process, listener)
        finally:
            _end(process)
    if outcome is not None:
        return outcome
    return _outcome_without_result(process.returncode, relay, classify.kills_since(kills_before), on_cpu=on_cpu)


def _start_program(request: TrialRequest, address: str) -> subprocess.Popen[bytes]:
    """The program, in a process group of its own within the trial's session; it ends with this process."""
    job = request.job
    assert job.workload.program is not None
    arguments = Command.parse(job.workload.program).arguments(request.config, job.workload, source_of(job.model))
    on_cpu = job.hardware.kind == "cpu"

    def set_up() -> None:
        """In the new process, before the program replaces it."""
        die_with_parent()
        if on_cpu:
            process_memory.limit_to(request.memory_limit_bytes + BEFORE_LIMIT_BYTES)

    return subprocess.Popen(
        arguments,
        env=of_program(address, threads_per_rank(job.hardware, None, sharing=request.sharing)),
        cwd=request.folder,
        process_group=0,
        preexec_fn=set_up,
    )


@dataclass(slots=True, kw_only=True)
class _Relay:
    """Passes on what a program reports."""

    events: EventPipe
    greeting: bytes
    """The first line that a reporting process is sent."""
    steps: int = 0
    """Optimizer steps that were reported."""
    outcome: Outcome | None = None
    _connection: socket.socket | None = None
    _pending: bytes = b""
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def follow(self, process: subprocess.Popen[bytes], listener: socket.socket) -> Outcome | None:
        """The outcome that the program reports; None if it ends before."""
        self._selector.register(listener, selectors.EVENT_READ)
        with self._selector:
            while self.outcome is None:
                has_ended = process.poll() is not None  # asked first: what it has sent by then is all there is
                ready = self._selector.select(timeout=0 if has_ended else 0.1)
                for key, _ in ready:
                    self._accept(listener) if key.fileobj is listener else self._read()
                if has_ended and not ready:
                    return None
        return self.outcome

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
        elif self._connection is not None:
            connection.close()
            reason = "the program trains in several processes at once: its trial is on one device"
            self.outcome = Unsupported(reason=reason)
        else:
            self._connection = connection
            self._selector.register(connection, selectors.EVENT_READ)
            with suppress(BrokenPipeError):
                connection.sendall(self.greeting)

    def _read(self) -> None:
        assert self._connection is not None
        try:
            chunk = self._connection.recv(65536)
        except ConnectionResetError:
            chunk = b""
        if not chunk:  # a process of the program has ended; another may follow
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection, self._pending = None, b""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            # Two processes may write at once; then the exit status decides.
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                self._pass_on(Event.from_json(json.loads(line)))

    def _pass_on(self, event: Event) -> None:
        if event.result is not None:
            self.outcome = event.result
            return
        self.steps = max(self.steps, event.steps)
        self.events.phase = event.phase or self.events.phase
        self.events.send(event)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program, by force if it takes longer than two seconds, and everything that it has started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
    end_orphans()


def _outcome_without_result(status: int, relay: _Relay, kernel_oom_kills: int | None, *, on_cpu: bool) -> Outcome:
    """The outcome of a program that ended by itself with `status` before its trial had one."""
    output = tail(2)  # the program writes to the same file as this process
    status = _SIGNALS_BY_STATUS.get(status, status)
    if status == 0:
        reason = f"the program ended without reporting a step: {classify.HOW_TO_REPORT}"
        if relay.steps:
            # So many suffice however much they scatter: two of warm-up, thirty timed and, on an accelerator, one to
            # keep it busy.
            reason = f"the program ended after {relay.steps} optimizer steps: let it train for at least 33"
        # This says nothing about the config, so the next search must not take it for an answer.
        lines = "\n".join(output.splitlines()[-20:])
        return Crashed(reason=reason, phase=relay.events.phase, stderr_tail=lines, transient=True)
    outcome = classify.ended_without_result(
        status=status,
        phase=relay.events.phase,
        room=None,
        stderr=output,
        kernel_oom_kills=kernel_oom_kills,
        host_is_device=on_cpu,
    )
    if isinstance(outcome, Crashed) and outcome.exit_code is not None:
        last_line = lines_of(output, "it said nothing")[-1]
        return replace(outcome, reason=f"the program exited with status {status}: {last_line}")
    return outcome
