"""Things that a trial's child may do to its parent: entry functions for `TrialRunner(entry="entries:NAME")`."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autofit.core.outcome import Crashed
from autofit.trial.process import child
from autofit.trial.process.events import Event, EventPipe
from autofit.trial.process.fork_server import FORK_FAILURES

LATER_SECONDS = 1.0
"""By how much longer than its limit takes what takes too long."""


def _phase(descriptor: int, name: str) -> None:
    os.write(descriptor, (json.dumps({"phase": name}) + "\n").encode())


def by_name(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Runs the entry function that the model is named after; for any other name trains, with that name's change."""
    name = data["job"]["model"]["name"]
    if name in CHANGES:
        CHANGES[name](data)
    entry = child.run if name in CHANGES else globals().get(name, child.run)
    entry(data, descriptor, asked_at)


def killed(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Dies as if ended by the kernel's out-of-memory killer."""
    _phase(descriptor, "backward")
    os.kill(os.getpid(), signal.SIGKILL)


def hang(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Never ends, and ignores SIGTERM."""
    _phase(descriptor, "forward")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def cannot_be_forked(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Fails as a child does whose parent has initialised the driver."""
    raise RuntimeError(FORK_FAILURES[0])


def half_way(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Times two steps, says so with a file where the request names one, and never ends; ignores SIGTERM."""
    events = EventPipe(descriptor)
    events.enter("forward", 0.5)
    events.send(Event(peak_bytes=3000))
    events.enter("backward")
    events.send(Event(peak_bytes=5000))
    events.send(Event(step_seconds=9.0))  # of the warm-up
    events.send(Event(timing=True))
    events.send(Event(step_seconds=2.0))
    events.send(Event(step_seconds=4.0))
    if data["profile"] is not None:
        Path(data["profile"]).touch()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def stubborn_grandchild(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Leaves behind a process that ignores SIGTERM, has a session of its own and holds the pipe open."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, pass_fds=(descriptor,))
    print(f"grandchild {process.pid}", flush=True)
    os._exit(3)


def segfault(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Reads address 0."""
    print("about to fall", file=sys.stderr, flush=True)
    ctypes.string_at(0)


def garbage(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Prints what looks like answers, writes broken events, then runs a real trial."""
    print('{"outcome": {"outcome": "fits"}, "seconds": 0}' * 1000, flush=True)
    os.write(descriptor, b'\xff\xfe not json\n{"result": {"outcome": "no such"}}\n[1, 2]\n')
    child.run(data, descriptor, asked_at)


def nan_loss(data: Mapping[str, Any]) -> None:
    """Trains to a loss that is not a number."""
    from autofit.training.step import TrainingStep

    original = TrainingStep.micro_step

    def poisoned(self: TrainingStep, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) * float("nan")

    TrainingStep.micro_step = poisoned  # type: ignore[method-assign]


def wrong_loss(data: Mapping[str, Any]) -> None:
    """Trains with a loss kernel that is off by a tenth."""
    from autofit.training.loss_module import LossModule

    original = LossModule.forward

    def wrong(self: LossModule, tokens: Any, labels: Any, plain: Any = None) -> Any:
        return original(self, tokens, labels, plain) * (1.1 if plain is None else 1.0)

    LossModule.forward = wrong  # type: ignore[method-assign]


def wrong_gradient(data: Mapping[str, Any]) -> None:
    """Trains with a loss kernel whose value is right, and whose gradient is a tenth too small."""
    from autofit.training.loss_module import LossModule

    original = LossModule.forward

    def wrong(self: LossModule, tokens: Any, labels: Any, plain: Any = None) -> Any:
        loss = original(self, tokens, labels, plain)
        return loss if plain is not None else 0.9 * loss + 0.1 * loss.detach()

    LossModule.forward = wrong  # type: ignore[method-assign]


def overflowing(data: Mapping[str, Any]) -> None:
    """Starts with a loss scale that overflows, as the usual one does for larger models."""
    import torch

    torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**32)  # type: ignore[attr-defined,misc]


def records_slowly(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Answers at once and writes its recording after its deadline."""
    EventPipe(descriptor).send(Event(result=Crashed(reason="made"), recording=True))
    time.sleep(data["deadline_seconds"] + LATER_SECONDS)
    with open(data["profile"], "w") as file:
        file.write("recorded")


def dies_recording(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Answers, then is killed while it records, as if out of memory."""
    EventPipe(descriptor).send(Event(result=Crashed(reason="made"), recording=True))
    os.kill(os.getpid(), signal.SIGKILL)


def greedy_recording(data: Mapping[str, Any]) -> None:
    """Trains, then needs more than the trial's memory limit for the recording."""
    from autofit.trial.measure import measurement as measure

    def write_profile(path: str, run: Any) -> None:
        taken = bytearray(data["memory_limit_bytes"] + 1)
        with open(path, "w") as file:
            file.write(str(len(taken)))

    measure.write_profile = write_profile


def leaking(data: Mapping[str, Any]) -> None:
    """Keeps 16 MiB more at every step."""
    import torch

    from autofit.training.step import TrainingStep

    kept = []
    original = TrainingStep.update

    def update(self: TrainingStep, *args: Any, **kwargs: Any) -> None:
        kept.append(torch.ones(4 * 1024**2))
        original(self, *args, **kwargs)

    TrainingStep.update = update  # type: ignore[method-assign]


def slow_once(data: Mapping[str, Any]) -> None:
    """Sleeps in the first step that is timed."""
    from autofit.training.step import TrainingStep
    from autofit.trial.measure.pace import WARM_UPS

    original, done = TrainingStep.update, 0

    def update(self: TrainingStep, *args: Any, **kwargs: Any) -> None:
        nonlocal done
        done += 1
        if done == WARM_UPS + 1:
            time.sleep(2.0)
        original(self, *args, **kwargs)

    TrainingStep.update = update  # type: ignore[method-assign]


def expanding(data: Mapping[str, Any]) -> None:
    """Trains where the allocator says that its segments are expandable."""
    from autofit.trial.measure.meter import CpuMeter

    CpuMeter.expandable_segments = lambda self: True  # type: ignore[method-assign]


def raises(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """A Python error outside the real child."""
    raise RuntimeError("kaboom")


def greedy_in_a_group(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Takes more memory than its control group has, until the kernel ends it."""
    from autofit.trial.measure import process_memory

    process_memory.prefer_as_oom_victim()
    with open(os.path.join(os.environ["AUTOFIT_TEST_GROUP"], "cgroup.procs"), "w") as file:
        file.write("0")
    _phase(descriptor, "backward")
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1024**2)))


CRAWLING_SECONDS = 1000.0
"""What each micro-step takes of a trial that crawls."""


def crawling(data: Mapping[str, Any]) -> None:
    """Every micro-step seems to take as long."""
    from autofit.trial.measure.meter import CpuMeter

    CpuMeter.seconds = lambda self, start, end: CRAWLING_SECONDS  # type: ignore[method-assign]


def stuck(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """A micro-step begins that never ends."""
    EventPipe(descriptor).enter("forward", 0.25)
    time.sleep(3600.0)


def earns(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Takes longer than its allowance, which it has earned."""
    events = EventPipe(descriptor)
    events.send(Event(earned=True))
    time.sleep(data["allowance_seconds"] + LATER_SECONDS)
    events.send(Event(result=Crashed(reason="late")))


def takes_long(data: Mapping[str, Any]) -> None:
    """Trains as if each micro-step took long; plain training may have no more than 16 tokens of a sequence, the last
    ones, backwards."""
    from autofit.training.step import TrainingStep
    from autofit.trial.measure import measurement as measure

    whole, trained, run = TrainingStep.plain_gradient_norm, [], TrainingStep.reference_loss

    def reference(step: TrainingStep, tokens: Any) -> float:
        trained.append(tokens[0])
        return run(step, tokens)

    def short(step: TrainingStep, row: Any) -> float:
        assert row[0].tolist() == trained[0].tolist()[:-17:-1], row
        return whole(step, row)

    measure.is_brief = lambda seconds: True  # type: ignore[assignment]
    measure.COMPARED_TOKENS = 16  # type: ignore[misc]
    TrainingStep.reference_loss = reference  # type: ignore[method-assign]
    TrainingStep.plain_gradient_norm = short  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Mapping[str, Any]], None]] = {
    change.__name__: change
    for change in (
        *(crawling, expanding, greedy_recording, leaking, nan_loss, overflowing, slow_once, takes_long),
        *(wrong_gradient, wrong_loss),
    )
}
"""What is changed before a trial trains, by the model's name."""
