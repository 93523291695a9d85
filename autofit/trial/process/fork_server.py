"""The fork server: a process that never touches the device, has the heavy imports loaded, and forks a child per trial.

Run as `python -m autofit.trial.process.fork_server [--entry module:function]`. One JSON request per line on standard
input, one JSON answer per line on standard output. It enforces the deadline, classifies outcomes, kills a trial's whole
process group, and ends with everything it started when its standard input closes.

Two lines are not requests: `{"listen": address}` opens the port at which the next trial's ranks meet, and is answered
with `{"port": number}` or `{"error": why}`; `{"stop": {"interrupted": whether the user has}}` ends the running
trial, whose answer then says so.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, NoReturn

from autofit.core.outcome import Crashed, Fits
from autofit.core.units import MIB
from autofit.techniques.axes.sharding import uses_deepspeed
from autofit.training.distributed.rendezvous import listening
from autofit.training.postponed import compiler_postponed, import_postponed
from autofit.trial.attempt import Attempt
from autofit.trial.limits import shared_memory
from autofit.trial.limits.host_memory import HostWatch, host_shortage
from autofit.trial.limits.swap_folder import explained, swap_folder
from autofit.trial.machine import nvml
from autofit.trial.machine.watch import DeviceWatch
from autofit.trial.measure import process_memory
from autofit.trial.process import classify
from autofit.trial.process.child_process import ChildProcess, adopt_orphans, die_with_parent
from autofit.trial.process.commands import Commands
from autofit.trial.process.following import Follower
from autofit.trial.request import TrialRequest

DEFAULT_ENTRY = "autofit.trial.process.child:run"
FORK_FAILURES = (
    "Cannot re-initialize CUDA in forked subprocess",
    "CUDA driver initialization failed",
    "CUDA error: initialization error",
)
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

    def preload(self, model_type: str | None, *, deepspeed: bool = False, compiles: bool = False) -> None:
        """Import what children need. Nothing here may start a thread pool or touch a device."""
        before, thresholds = len(sys.modules), gc.get_threshold()
        gc.set_threshold(GC_THRESHOLD)
        try:
            self._import(model_type, deepspeed=deepspeed, compiles=compiles)
        finally:
            gc.set_threshold(*thresholds)
        if len(sys.modules) > before:
            gc.freeze()  # or every collection of every child would scan the libraries, and so copy them
        self._spawn = self._spawn or device_is_touched()

    def _import(self, model_type: str | None, *, deepspeed: bool, compiles: bool) -> None:
        on_gpu = os.environ.get("AUTOFIT_DEVICE_KIND", "cpu") != "cpu"
        # Importing bitsandbytes queries the driver for the device's capability, which no fork survives: children do it.
        postponed = import_postponed("bitsandbytes") if on_gpu else contextlib.nullcontext()
        with warnings.catch_warnings(), postponed, compiler_postponed():
            warnings.simplefilter("ignore")
            importlib.import_module("autofit.trial.measure.measurement")
            importlib.import_module("transformers.optimization")
            # What is imported here does not count towards the memory of a trial on the host.
            on_host = {"bitsandbytes": True, "deepspeed": deepspeed, "torch._inductor.compile_fx": compiles}
            for module in ["peft"] if on_gpu else ["peft", *(name for name, needed in on_host.items() if needed)]:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
            if model_type is not None and model_type not in self._preloaded:
                self._preloaded.add(model_type)
                with contextlib.suppress(Exception):  # the child's own attempt reports what is wrong
                    from transformers import AutoModelForCausalLM
                    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

                    AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[model_type]]

    def listen(self, address: str) -> dict[str, Any]:
        """Open a port at `address` for the next trial to take over; its number, or why there is none, as JSON."""
        self._stop_listening()
        try:
            self._listener = listening(address)
        except OSError as error:
            return {"error": f"no port at {address} can be had: {error.strerror or error}"}
        return {"port": self._listener.getsockname()[1]}

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def run(self, request: TrialRequest, commands: Commands) -> Attempt:
        """One execution of a request. Raises `EOFError` if the commands' other end has closed."""
        with swap_folder(request.config) as environment:
            attempt = self._run(request, commands, environment)
            attempt = replace(attempt, outcome=explained(attempt.outcome, environment))
        evidence = "".join(getattr(attempt.outcome, name, "") for name in ("reason", "stderr_tail"))
        if not self._spawn and any(sign in evidence for sign in FORK_FAILURES):
            self._spawn = True
            if request.rendezvous is None:  # the others of a group wait where this trial's port was
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
        host = None if on_cpu else HostWatch(is_device=nvml.shares_host())
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
        follower = Follower(child=child, request=request, commands=commands, started=started, host=host, device=device)
        try:
            outcome = follower.follow()
            if outcome is None:
                outcome = classify.ended_without_result(
                    status=child.status,
                    phase=child.phase,
                    room=child.room_bytes,
                    stderr=child.tail(),
                    kernel_oom_kills=classify.kills_since(kills_before),
                    host_is_device=on_cpu,
                    short_bytes=short_bytes,
                )
        finally:
            child.end(kill=True)
            child.output.close()
            shared_memory.remove_orphans(segments_before)
            if held_before is not None:
                _await_device(held_before)
        self._had_device |= held_before is not None
        if not isinstance(outcome, Fits):
            may_be_gone = self._had_device and not on_cpu
            stuck = "its driver does not let a killed trial end" if child.is_stuck else None
            why = stuck or (nvml.why_unreachable() if may_be_gone else None)
            if why is not None:
                outcome = classify.device_gone(why, outcome, child.phase)
        seconds = time.monotonic() - started - child.recording_seconds
        return Attempt(outcome=outcome, seconds=seconds, device_state=device.state())

    def _start(self, data: Mapping[str, Any], asked_at: float, environment: Mapping[str, str]) -> ChildProcess:
        output = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the child runs)
        read_end, write_end = os.pipe()
        inherited = [write_end]
        if self._listener is not None:
            inherited.append(self._listener.fileno())
            data = {**data, "listener": self._listener.fileno()}
        if self._spawn:
            module = "autofit.trial.process.child"
            process = subprocess.Popen(
                [sys.executable, "-m", module, self._entry, str(write_end), str(asked_at)],
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


def device_is_touched() -> bool:
    """Whether this process has initialised CUDA, so that children forked from it cannot."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


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
    preloads = arguments.entry == DEFAULT_ENTRY and not arguments.spawn
    if preloads:
        server.preload(None)
    commands = Commands(0)
    while (command := commands.next()) is not None:
        if "stop" in command:
            continue  # its trial has ended meanwhile
        if "listen" in command:
            answer = server.listen(command["listen"])
        else:
            request = TrialRequest.from_json(command)
            if preloads:
                config, model_type = request.config, request.job.model.config.get("model_type")
                server.preload(model_type, deepspeed=uses_deepspeed(config), compiles=config["compile"] is True)
            try:
                answer = server.run(request, commands).to_json()
            except EOFError:
                return
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
