"""The other end of the fork server's pipes: starts it, sends requests, receives outcomes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from autofit.core.outcome import Crashed
from autofit.training.prerequisites.nvme import remove_orphans
from autofit.trial.attempt import Attempt
from autofit.trial.limits.segments import ALLOCATOR, allocator_settings
from autofit.trial.machine import nvml
from autofit.trial.process.fork_server import DEFAULT_ENTRY
from autofit.trial.program.environment import keeping_users
from autofit.trial.request import TrialRequest

ENDING_SECONDS = 5.0
"""How long the fork server may take to end."""
LONGEST_WAIT_MS = 2**31 - 1
"""Most that poll(2) waits: 24 days."""
GRACE_SECONDS = 120.0
"""How long after its child's time the fork server may be silent: after that it hangs itself, in the driver. What it
imports before the child's time begins may take as long as both."""
LISTENING_SECONDS = 600.0
"""How long it may take to open a port, its imports included: these take a busy machine three minutes."""


def trial_environment(kind: str, number: int = 0) -> dict[str, str]:
    """Environment of the fork server and its children, for the `number`th visible device of `kind`.

    Raises `EnvironmentLacks` where the user's settings of CUDA's allocator make memory unmeasurable.
    """
    device = nvml.visible(number) if kind == "cuda" else None
    # By its id, because CUDA numbers devices by speed and NVML by slot.
    visible_devices = {"CUDA_VISIBLE_DEVICES": device.uuid} if device is not None else {}
    variables = {
        "AUTOFIT_DEVICE_KIND": kind,
        # Otherwise DeepSpeed probes for the device itself whenever it is imported.
        "DS_ACCELERATOR": kind,
        **(dict.fromkeys(ALLOCATOR, allocator_settings()) if kind == "cuda" else {}),
        # Lets torch see devices through NVML, without initialising the driver in the fork server.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Trials of autofit's own step download nothing, and libraries print nothing.
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return {**os.environ, **visible_devices, **keeping_users(variables)}


class TrialRunner:
    """Runs trials one after another in fresh children of one fork server; one runner per device.

    Used from one thread, except for `stop`. A fork server that dies is restarted for the next trial.
    """

    def __init__(self, *, kind: str = "cpu", device: int = 0, entry: str = DEFAULT_ENTRY) -> None:
        """For the `device`th visible device of `kind` on this machine."""
        self._environment = trial_environment(kind, device)
        self._command = [sys.executable, "-m", "autofit.trial.process.fork_server", "--entry", entry]
        self._process: subprocess.Popen[str] | None = None
        self._server_stderr: IO[bytes] | None = None
        """The fork server's standard error: evidence if it cannot even start."""
        self._running = False
        self._write_lock = threading.Lock()
        """Held while a command is sent to the fork server, so that a stop reaches the trial that it was meant for."""

    def start(self) -> subprocess.Popen[str]:
        """Start the fork server now, so that its imports overlap with other work, unless it runs; returns it."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._server_stderr = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the fork server runs)
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._server_stderr,
                text=True,
                start_new_session=True,
            )
        return self._process

    def attempt(self, request: TrialRequest) -> Attempt:
        """Run `request`. A trial's failure never raises."""
        process = self.start()
        patience_seconds = request.most_seconds + GRACE_SECONDS
        try:
            answer = self._answer_to(process, request.to_json(), patience_seconds)
        except TimeoutError:
            self.close()
            reason = "the trial's parent process does not answer: the device's driver may hang"
            return Attempt(outcome=Crashed(reason=reason, transient=True), seconds=patience_seconds)
        if answer is None:
            return Attempt(outcome=self._parent_died(process), seconds=0.0)
        return Attempt.from_json(answer)

    def listen(self, address: str) -> int:
        """Have the fork server open a port at `address` for the next trial's ranks; its number. Raises `OSError`."""
        process = self.start()
        try:
            answer = self._answer_to(process, {"listen": address}, LISTENING_SECONDS)
        except TimeoutError:
            self.close()
            raise OSError("the trial's parent process does not answer") from None
        if answer is None:
            raise OSError(self._parent_died(process).reason)
        if "error" in answer:
            raise OSError(answer["error"])
        return int(answer["port"])

    def stop(self, *, interrupted: bool = False) -> None:
        """End the running trial, if there is one; `attempt` then says that it was stopped or, if the user has
        interrupted it, what it has shown so far. For another thread to call."""
        with self._write_lock:
            process = self._process
            if self._running and process is not None:
                self._send(process, {"stop": {"interrupted": interrupted}})

    def _answer_to(
        self, process: subprocess.Popen[str], line: dict[str, Any], patience_seconds: float
    ) -> dict[str, Any] | None:
        """The fork server's answer; None if it died, or `close` was called meanwhile. Raises `TimeoutError` once it has
        said nothing for so long, not even that a child begins."""
        assert process.stdout is not None
        with self._write_lock:
            self._send(process, line)
            self._running = True
        try:
            poller = select.poll()  # `select.select` takes no descriptor beyond 1023
            poller.register(process.stdout, select.POLLIN)
            first = "\n"
            while first == "\n":
                if not poller.poll(min(1000.0 * patience_seconds, LONGEST_WAIT_MS)):
                    raise TimeoutError
                first = os.read(process.stdout.fileno(), 1).decode()  # or a buffer would take more than is waited for
            answer = first + process.stdout.readline()
        except ValueError:
            answer = ""
        finally:
            with self._write_lock:
                self._running = False
        return json.loads(answer) if answer else None

    def _send(self, process: subprocess.Popen[str], line: dict[str, Any]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it died or was closed, as the missing answer will show
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()

    def _parent_died(self, process: subprocess.Popen[str]) -> Crashed:
        try:
            how = f"ended with status {process.wait(ENDING_SECONDS)}"
        except subprocess.TimeoutExpired:
            how = "says nothing more and does not end"
        lines: list[str] = []
        if self._server_stderr is not None:
            self._server_stderr.seek(0)
            lines = self._server_stderr.read().decode(errors="replace").splitlines()
        self.close()
        reason, tail = f"the trial's parent process {how}", "\n".join(lines[-20:])
        return Crashed(reason=reason, exit_code=process.returncode, stderr_tail=tail, transient=True)

    def hang_up(self) -> None:
        """Have the fork server end itself and any trial it runs, without waiting for it."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def close(self) -> None:
        """End the fork server and any trial it runs."""
        self.hang_up()
        process, self._process = self._process, None
        server_stderr, self._server_stderr = self._server_stderr, None
        if server_stderr is not None:
            server_stderr.close()
        if process is None:
            return
        assert process.stdout is not None
        try:
            # A fork server that is stuck in the driver does not even end when it is killed.
            process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
        process.stdout.close()
        if process.returncode != 0:
            remove_orphans()

    def __enter__(self) -> TrialRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
