"""The fork server: a process that never touches the device, has the heavy imports loaded, and forks a child per trial.

Run as `python -m autofit.trial.process.fork_server [--entry module:function]`. One JSON request per line on standard
input, one JSON answer per line on standard output, and before it an empty line each time that a child is started for
the request: the time of that child begins. It enforces the deadline, classifies outcomes, kills a trial's whole
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any, NoReturn

from autofit.core.outcome import Crashed, Fits, OutOfMemory
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
from autofit.trial.process.child_process import ChildProcess, adopt_orphans, die_with_parent, tail
from autofit.trial.process.following import Commands, Follower
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """What the machine was like before a trial: it explains a child that ends without a word, and is to come back."""

    on_cpu: bool
    held_bytes: int | None
    """Memory of the device that was held; None on a processor, and where the driver does not say."""
    short_bytes: int
    """By how much the host falls short of all ranks' memory limits."""
    kernel_kills: int | None
    segments: set[Path]
    """Of shared memory."""

    @classmethod
    def now(cls, request: TrialRequest) -> _Before:
        on_cpu = request.job.hardware.kind == "cpu"
        ranks = 1 if request.rendezvous is None else request.rendezvous.ranks
        available = process_memory.host_available() if on_cpu else None
        return cls(
            on_cpu=on_cpu,
            held_bytes=None if on_cpu else nvml.held_bytes(),
            short_bytes=host_shortage(request.memory_limit_bytes, ranks, available),
            kernel_kills=classify.kernel_oom_kills(),
            segments=shared_memory.segments(),
        )

    def why_ended(self, child: ChildProcess) -> OutOfMemory | Crashed:
        """The outcome of a child that has ended without one."""
        return classify.ended_without_result(
            status=child.status,
            phase=child.phase,
            room=child.room_bytes,
            stderr=tail(child.output.fileno()),
            kernel_oom_kills=classify.kills_since(self.kernel_kills),
            host_is_device=self.on_cpu,
            short_bytes=self.short_bytes,
        )

    def restore(self) -> None:
        """Remove the shared memory that the trial has left, and wait until its device's memory is free, so that the
        next trial finds it so. 64 MiB more than before are tolerated: other processes' memory fluctuates, too."""
        shared_memory.remove_orphans(self.segments)
        if self.held_bytes is None:
            return
        until = time.monotonic() + DEVICE_BACK_SECONDS
        while (held := nvml.held_bytes()) is not None and held > self.held_bytes + 64 * MIB:
            if time.monotonic() > until:
                return  # another process holds it
            time.sleep(0.05)


class ForkServer:
    """Runs one trial at a time."""

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._spawn = False
        """Whether children are started anew, because forking one that can use the device is no longer possible."""
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

    def run(self, request: TrialRequest, commands: Commands, begins: Callable[[], object] = lambda: None) -> Attempt:
        """One execution of a request; `begins` is called before each child. Raises `EOFError` if the commands' other
        end has closed."""
        begins()
        with swap_folder(request.config) as environment:
            attempt = self._run(request, commands, environment)
            attempt = replace(attempt, outcome=explained(attempt.outcome, environment))
        evidence = "".join(getattr(attempt.outcome, name, "") for name in ("reason", "stderr_tail"))
        if not self._spawn and any(sign in evidence for sign in FORK_FAILURES):
            self._spawn = True
            if request.rendezvous is None:  # the others of a group wait where this trial's port was
                return self.run(request, commands, begins)
        return attempt

    def _run(self, request: TrialRequest, commands: Commands, environment: Mapping[str, str]) -> Attempt:
        """Start a child, follow it to its end, and remove what it leaves behind."""
        started, before = time.monotonic(), _Before.now(request)
        host = None if before.on_cpu else HostWatch(is_device=nvml.shares_host())
        try:
            child = self._start(request.to_json(), started - request.seconds_since_asked, environment)
        except OSError as error:
            reason = f"no process for the trial can be started: {error}"
            return Attempt(outcome=Crashed(reason=reason, transient=True), seconds=time.monotonic() - started)
        finally:
            self._stop_listening()  # the child listens now; once it is dead, the port must not seem open
        device = DeviceWatch(request.job.hardware, child.pid, before.held_bytes, request.rendezvous)
        follower = Follower(child=child, request=request, commands=commands, started=started, host=host, device=device)
        try:
            outcome = follower.follow() or before.why_ended(child)
        finally:
            child.end(kill=True)
            child.output.close()
            before.restore()
        self._had_device |= before.held_bytes is not None
        if not isinstance(outcome, Fits) and (why := self._why_device_is_gone(child)) is not None:
            outcome = classify.device_gone(why, outcome, child.phase)
        seconds = time.monotonic() - started - child.recording_seconds
        return Attempt(outcome=outcome, seconds=seconds, device_state=device.state())

    def _why_device_is_gone(self, child: ChildProcess) -> str | None:
        """Why the device no longer answers, after a trial that did not fit; None where it does, or never has."""
        if child.is_stuck:
            return "its driver does not let a killed trial end"
        return nvml.why_unreachable() if self._had_device else None

    def _start(self, data: Mapping[str, Any], asked_at: float, environment: Mapping[str, str]) -> ChildProcess:
        with contextlib.ExitStack() as unless_started:
            output = unless_started.enter_context(tempfile.TemporaryFile())
            read_end, write_end = os.pipe()
            for end in (read_end, write_end):
                unless_started.callback(os.close, end)
            inherited = [write_end]
            if self._listener is not None:
                inherited.append(self._listener.fileno())
                data = {**data, "listener": self._listener.fileno()}
            if self._spawn:
                pid = self._spawned(data, inherited, output, asked_at, environment)
            else:
                pid = os.fork()
                if pid == 0:
                    os.close(read_end)
                    os.environ.update(environment)
                    self._become_child(data, write_end, output.fileno(), asked_at)
            unless_started.pop_all()
        os.close(write_end)
        return ChildProcess(pid=pid, events=read_end, output=output)

    def _spawned(
        self,
        data: Mapping[str, Any],
        inherited: Sequence[int],
        output: IO[bytes],
        asked_at: float,
        environment: Mapping[str, str],
    ) -> int:
        """The number of a child that is started anew, with the `inherited` descriptors, the events' first."""
        process = subprocess.Popen(
            [sys.executable, "-m", "autofit.trial.process.child", self._entry, str(inherited[0]), str(asked_at)],
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
        process.returncode = 0  # waited for by pid here, not by Popen
        return process.pid

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--entry", default=DEFAULT_ENTRY)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C, by closing our input
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with answers
    server = ForkServer(arguments.entry)
    preloads = arguments.entry == DEFAULT_ENTRY
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
                answer = server.run(request, commands, lambda: answers.write("\n")).to_json()
            except EOFError:
                return
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
