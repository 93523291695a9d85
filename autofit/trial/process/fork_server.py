"""The fork server: a process that never touches the device, has the heavy imports loaded, and forks a child per trial.

Run as `python -m autofit.trial.process.fork_server [--entry module:function]`. One JSON request per line on standard
input, one JSON answer per line on standard output. It enforces the deadline, classifies outcomes, kills a trial's whole
process group, and ends with everything it started when its standard input closes.

Two lines are not requests: `{"listen": address}` opens the port at which the next trial's ranks meet, and is answered
with `{"port": number}` or `{"error": why}`; `{"stop": why}` ends the running trial, whose answer then says so.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, NoReturn

from autofit.core.outcome import Crashed, Fits, Outcome, TimedOut
from autofit.core.units import MIB
from autofit.techniques.axes.sharding import uses_deepspeed
from autofit.training.distributed.rendezvous import listening
from autofit.training.postponed import import_postponed
from autofit.trial.attempt import Attempt
from autofit.trial.limits import shared_memory
from autofit.trial.limits.host_memory import HostExhausted, HostWatch, host_shortage
from autofit.trial.limits.swap_folder import explained, swap_folder
from autofit.trial.machine import nvml
from autofit.trial.machine.watch import DeviceWatch
from autofit.trial.measure import process_memory
from autofit.trial.measure.pace import useful_speed
from autofit.trial.process import classify
from autofit.trial.process.child_process import ChildProcess, adopt_orphans, die_with_parent
from autofit.trial.process.commands import Commands, Stopped
from autofit.trial.request import TrialRequest

DEFAULT_ENTRY = "autofit.trial.process.child:run"
FORK_FAILURES = ("Cannot re-initialize CUDA in forked subprocess", "CUDA driver initialization failed")
"""Signs that the driver was initialised in this process before the fork; children are then spawned instead."""
GC_THRESHOLD = 100_000
"""New objects between two garbage collections while libraries are imported. With Python's default of 700, importing
takes a fifth longer; with no collection at all, the process would keep 8 MiB more."""
DEVICE_BACK_SECONDS = 10.0
"""How long the driver may take to free the memory of a process that has ended."""


class ForkServer:
    """Runs one trial at a time."""

    def __init__(self, entry: str, *, spawn: bool) -> None:
        self._entry = entry
        self._spawn = spawn
        self._preloaded: set[str] = set()
        self._had_device = False
        """Whether the driver has answered for an accelerator: if it does no longer, the device is gone."""
        self._listener: socket.socket | None = None
        """The socket at which the next trial's ranks meet, if this process has opened it."""
        adopt_orphans()

    def preload(self, model_type: str | None, *, deepspeed: bool = False) -> None:
        """Import what children need. Nothing here may start a thread pool or touch a device."""
        before, thresholds = len(sys.modules), gc.get_threshold()
        gc.set_threshold(GC_THRESHOLD)
        try:
            self._import(model_type, deepspeed=deepspeed)
        finally:
            gc.set_threshold(*thresholds)
        if len(sys.modules) > before:
            gc.freeze()  # or every collection of every child would scan the libraries, and so copy them
        self._spawn = self._spawn or device_is_touched()

    def _import(self, model_type: str | None, *, deepspeed: bool) -> None:
        on_gpu = os.environ.get("AUTOFIT_DEVICE_KIND", "cpu") != "cpu"
        # Importing bitsandbytes queries the driver for the device's capability, which no fork survives: children do it.
        postponed = import_postponed("bitsandbytes") if on_gpu else contextlib.nullcontext()
        with warnings.catch_warnings(), postponed:
            warnings.simplefilter("ignore")
            for module in ("autofit.trial.measure.measurement", "peft", "transformers.optimization"):
                if module != "peft" or importlib.util.find_spec("peft") is not None:
                    importlib.import_module(module)
            if not on_gpu:
                # What is imported here does not count towards the memory of a trial on the host.
                for module in ("bitsandbytes", *(["deepspeed"] * deepspeed)):
                    with contextlib.suppress(ImportError):
                        importlib.import_module(module)
            if model_type is not None and model_type not in self._preloaded:
                self._preloaded.add(model_type)
                with contextlib.suppress(Exception):  # the child's own attempt reports what is wrong
                    from transformers import AutoModelForCausalLM
                    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

                    AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[model_type]]

    def listen(self, address: str) -> int:
        """Open a port at `address` for the next trial to take over; returns its number. Raises `OSError`."""
        self._stop_listening()
        self._listener = listening(address)
        return int(self._listener.getsockname()[1])

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def run(self, request: TrialRequest, commands: Commands) -> Attempt:
        """One execution of a request. Raises `EOFError` if the commands' other end has closed."""
        with swap_folder(request.config) as environment:
            attempt = self._run(request, commands, environment)
            attempt = replace(attempt, outcome=explained(attempt.outcome, environment))
        if not self._spawn and any(sign in getattr(attempt.outcome, "stderr_tail", "") for sign in FORK_FAILURES):
            self._spawn = True
            return self.run(request, commands)
        return attempt

    def _run(self, request: TrialRequest, commands: Commands, environment: Mapping[str, str]) -> Attempt:
        started = time.monotonic()
        hardware, rendezvous = request.job.hardware, request.rendezvous
        on_cpu = hardware.kind == "cpu"
        held_before = None if on_cpu else nvml.held_bytes()
        ranks = 1 if rendezvous is None else rendezvous.ranks
        available = process_memory.host_available() if on_cpu else None
        short_bytes = host_shortage(request.memory_limit_bytes, ranks, available)
        watch = None if on_cpu else HostWatch()
        kills_before = classify.kernel_oom_kills()
        segments_before = shared_memory.segments()
        try:
            child = self._start(request.to_json(), started - request.seconds_since_asked, environment)
        except OSError as error:
            reason = f"no process for the trial can be started: {error}"
            return Attempt(outcome=Crashed(reason=reason, transient=True), seconds=time.monotonic() - started)
        finally:
            self._stop_listening()  # the child listens now; once it is dead, the port must not seem open
        device = DeviceWatch(hardware, child.pid, held_before, rendezvous)
        try:
            status, outcome = self._follow(child, request, started, commands, watch, device)
            if outcome is None:
                outcome = classify.ended_without_result(
                    status=status,
                    phase=child.phase,
                    room=child.room,
                    stderr=child.tail(),
                    kernel_oom_kills=classify.kills_since(kills_before),
                    host_is_device=on_cpu,
                    short_bytes=short_bytes,
                )
        except Stopped as stop:
            outcome = _stopped(child, time.monotonic() - started, interrupted=stop.interrupted)
        except HostExhausted as error:
            assert watch is not None
            outcome = child.result or watch.outcome(error, child.phase)
        finally:
            child.end(kill=True)
            child.output.close()
            shared_memory.remove_orphans(segments_before)
            if held_before is not None:
                _await_device(held_before)
        self._had_device |= held_before is not None
        if not isinstance(outcome, Fits) and (why := _why_gone(child, had_device=self._had_device and not on_cpu)):
            outcome = classify.device_gone(why, outcome, child.phase)
        seconds = time.monotonic() - started - child.recording_seconds
        return Attempt(outcome=outcome, seconds=seconds, device_state=device.state())

    def _follow(
        self,
        child: ChildProcess,
        request: TrialRequest,
        started: float,
        commands: Commands,
        watch: HostWatch | None,
        device: DeviceWatch,
    ) -> tuple[int, Outcome | None]:
        """Listen to the child until it ends or its time is over, then end it. Returns its exit status, and its outcome
        if it has one. Raises what `commands` and `watch` raise."""
        deadline, allowance = request.deadline_seconds, _allowance(request)
        longest_step, end_times = _longest_step(request), (started + deadline, started + allowance)
        finished = self._listen(
            child, lambda: min(end_times[not child.earned], child.useless_at(longest_step)), commands, watch, device
        )
        device.end()
        if child.recording:
            answered_at = time.monotonic()
            # What a trial that has answered still writes does not count towards its deadline.
            until = answered_at + 600.0
            finished = self._listen(child, lambda: until, commands, watch, device, to_its_end=True)
            child.recording_seconds = time.monotonic() - answered_at
        status = child.end(kill=not finished)
        if not finished and child.result is None:
            limit = deadline if child.earned else allowance
            return status, _unfinished(child, min(limit, time.monotonic() - started))
        return status, child.result

    def _start(self, data: Mapping[str, Any], asked_at: float, environment: Mapping[str, str]) -> ChildProcess:
        output = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the child runs)
        read_end, write_end = os.pipe()
        inherited = [write_end]
        if self._listener is not None:
            inherited.append(self._listener.fileno())
            data = {**data, "listener": self._listener.fileno()}
        if self._spawn:
            module = "autofit.trial.process.spawned"
            command = [sys.executable, "-m", module, self._entry, str(write_end), str(asked_at)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                close_fds=True,
                pass_fds=inherited,
                start_new_session=True,
            )
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(data).encode())
            pid = process.pid
            process.returncode = 0  # waited for by pid here, not by Popen
        else:
            pid = os.fork()
            if pid == 0:
                os.close(read_end)
                os.environ.update(environment)
                self._become_child(data, write_end, output.fileno(), asked_at)
        os.close(write_end)
        return ChildProcess(pid=pid, events=read_end, output=output)

    def _become_child(self, data: Mapping[str, Any], events: int, output: int, asked_at: float) -> NoReturn:
        """In the forked child: start its own session, send output to a file, then call the entry function."""
        code = 1
        try:
            os.setsid()
            die_with_parent()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            resolve_name(self._entry)(data, events, asked_at)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)  # skip finalisers: what they would clean up is the parent's

    def _listen(
        self,
        child: ChildProcess,
        deadline: Callable[[], float],
        commands: Commands,
        watch: HostWatch | None,
        device: DeviceWatch,
        *,
        to_its_end: bool = False,
    ) -> bool:
        """Read events until the child closes its pipe or, unless `to_its_end`, has sent a result; False once the
        deadline has passed. Raises what `commands` and `watch` raise."""
        with selectors.DefaultSelector() as selector:
            selector.register(child.events, selectors.EVENT_READ)
            selector.register(commands.descriptor, selectors.EVENT_READ)
            while to_its_end or child.result is None:
                if commands.waiting:
                    commands.check()
                if watch is not None:
                    watch.check()
                device.follow(child.is_timing)
                left = deadline() - time.monotonic()
                if left <= 0:
                    return False
                for key, _ in selector.select(timeout=min(left, 1.0 if watch is None else 0.1)):
                    if key.fd == commands.descriptor:
                        commands.check()
                        continue
                    chunk = os.read(child.events, 65536)
                    if not chunk:
                        return True
                    child.take(chunk)
                    device.follow(child.is_timing)
                if child.has_died():
                    child.take_rest()
                    return True
        return True


def _stopped(child: ChildProcess, seconds: float, *, interrupted: bool) -> Outcome:
    """The outcome of a child that is stopped after `seconds`, by the user or because another rank has failed."""
    child.take_rest()
    if child.result is not None:
        return child.result
    return _unfinished(child, seconds, interrupted=True) if interrupted else classify.stopped(child.phase)


def _unfinished(child: ChildProcess, seconds: float, *, interrupted: bool = False) -> TimedOut:
    """The outcome of a child that has not ended after `seconds`, with what it has measured so far."""
    step_seconds = child.least_step_seconds
    return classify.timed_out(
        deadline_seconds=seconds,
        phase=child.phase,
        interrupted=interrupted,
        phases_entered=child.phases_entered,
        least_step_seconds=step_seconds,
        is_proven=step_seconds is not None and step_seconds == child.shown_seconds,
        peak_bytes=child.peak_bytes,
        timed_seconds=child.timed_seconds,
    )


def _allowance(request: TrialRequest) -> float:
    """Seconds that the trial may take unless it earns more. The first of several ranks judges for all of them."""
    deadline, allowance = request.deadline_seconds, request.allowance_seconds
    return min(deadline, allowance) if allowance is not None and _judges(request) else deadline


def _judges(request: TrialRequest) -> bool:
    """Whether this rank's time decides how long the trial goes on."""
    return request.rendezvous is None or request.rendezvous.rank == 0


def _longest_step(request: TrialRequest) -> float:
    """Seconds of an optimizer step beyond which the trial is of no use; infinite if no step is too slow."""
    useful = useful_speed([rival.tokens_per_second for rival in request.rivals], request.least_tokens_per_second)
    if not useful or not _judges(request):
        return math.inf
    return request.job.workload.tokens_per_step / useful


def device_is_touched() -> bool:
    """Whether this process has initialised CUDA, so that children forked from it cannot."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _why_gone(child: ChildProcess, *, had_device: bool) -> str | None:
    """Why the trial's device can no longer be used; None if it can."""
    if child.is_stuck:
        return "its driver does not let a killed trial end"
    return nvml.why_unreachable() if had_device else None


def _await_device(held_before: int) -> None:
    """Wait until no more of the device's memory is held than before the trial, so that the next one finds it free.
    64 MiB more are tolerated: other processes' memory fluctuates, too."""
    until = time.monotonic() + DEVICE_BACK_SECONDS
    while (held := nvml.held_bytes()) is not None and held > held_before + 64 * MIB:
        if time.monotonic() > until:
            return  # another process holds it
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--entry", default=DEFAULT_ENTRY)
    parser.add_argument("--spawn", action="store_true", help="start every child anew instead of forking")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C, by closing our input
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with answers
    server = ForkServer(arguments.entry, spawn=arguments.spawn)
    if arguments.entry == DEFAULT_ENTRY and not arguments.spawn:
        server.preload(None)
    commands = Commands(0)
    while (command := commands.next()) is not None:
        if "stop" in command:
            continue  # its trial has ended meanwhile
        if "listen" in command:
            answer = _listening_answer(server, command["listen"])
        else:
            request = TrialRequest.from_json(command)
            if arguments.entry == DEFAULT_ENTRY and not arguments.spawn:
                server.preload(request.job.model.config.get("model_type"), deepspeed=uses_deepspeed(request.config))
            try:
                answer = server.run(request, commands).to_json()
            except EOFError:
                return
        answers.write(json.dumps(answer) + "\n")


def _listening_answer(server: ForkServer, address: str) -> dict[str, Any]:
    try:
        return {"port": server.listen(address)}
    except OSError as error:
        return {"error": f"no port at {address} can be had: {error.strerror or error}"}


if __name__ == "__main__":
    main()
