"""Things that ranks may do to their group: entry functions for children, by the model's name. Other names train."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import entries

from autofit.techniques.axes.sharding import NVME_VARIABLE
from autofit.training.distributed.rendezvous import Rendezvous
from autofit.trial.process import child
from autofit.trial.process.events import EventPipe

Collective = Callable[[str], None]


def by_name(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """Does what the model is named after, in a group that has met and been through a few collectives.

    If the name gives a fate to some kinds of sharding only (`FATES_OF`), the others train."""
    name = data["job"]["model"]["name"]
    fate = FATES.get(name) or FATES_OF.get(name, {}).get(data["config"]["sharding"])
    if fate is None:
        CHANGES.get(name, lambda data: None)(data)
        child.run(data, descriptor, asked_at)
        return
    from autofit.training.distributed.ranks import join

    events = EventPipe(descriptor)
    place = Rendezvous.from_json(data["rendezvous"])
    ranks = join("cpu", place, timeout_seconds=data["deadline_seconds"] + 60.0, listener=data.get("listener"))

    def collective(phase: str) -> None:
        events.enter(phase)
        ranks.largest([float(place.rank)])

    for phase in ("forward", "backward", "optimizer"):
        collective(phase)
    fate(place.rank, collective)


def rank_1_dies(rank: int, collective: Collective) -> None:
    """Rank 1 dies in the middle of a collective, in which rank 0 waits."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    collective("forward")


def rank_1_hangs(rank: int, collective: Collective) -> None:
    collective("forward")
    if rank == 1:
        threading.Event().wait()
    collective("backward")


def rank_1_raises(rank: int, collective: Collective) -> None:
    collective("forward")
    if rank == 1:
        raise ValueError("kaboom")
    collective("backward")


def rank_0_is_deaf(rank: int, collective: Collective) -> None:
    """Rank 0 is in no collective, so it does not notice what happens to rank 1; it also ignores SIGTERM."""
    if rank == 1:
        raise ValueError("kaboom")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60.0)


def leaves_segment(data: Mapping[str, Any]) -> None:
    """Dies with a shared memory segment that only it has mapped, as with NCCL before all ranks have mapped it."""
    path = f"/dev/shm/nccl-{data['profile']}"
    with open(path, "xb+") as file:
        file.truncate(4096)
        mapped = mmap.mmap(file.fileno(), 4096)
        os.utime(path, (0, time.time() - 2.0))  # made a while ago
        os.kill(os.getpid(), signal.SIGKILL)
        mapped.close()


def leaves_swap(data: Mapping[str, Any]) -> None:
    """Leaves parameters in files and dies, before its parent or with it."""
    with open(os.path.join(os.environ[NVME_VARIABLE], "param_0.swp"), "wb") as file:
        file.write(b"0" * 4096)
    os.kill(os.getpid() if data["profile"] == "itself" else os.getppid(), signal.SIGKILL)
    threading.Event().wait()


def uneven_clocks(data: Mapping[str, Any]) -> None:
    """Rank 1's steps take much longer, and never equally long."""
    from autofit.trial.measure.meter import CpuMeter

    original, chance = CpuMeter.seconds, random.Random(0)
    rank = data["rendezvous"]["rank"]

    def seconds(self: CpuMeter, start: float, end: float) -> float:
        return original(self, start, end) * (1.0 + rank * chance.uniform(20.0, 100.0))

    CpuMeter.seconds = seconds  # type: ignore[method-assign]


def nan_on_rank_1(data: Mapping[str, Any]) -> None:
    """Rank 1's loss is NaN, rank 0's is not."""
    from autofit.training.step import TrainingStep

    original = TrainingStep.run
    factor = float("nan") if data["rendezvous"]["rank"] == 1 else 1.0

    def poisoned(self: TrainingStep, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) * factor

    TrainingStep.run = poisoned  # type: ignore[method-assign]


def greedy_on_rank_1(data: Mapping[str, Any]) -> None:
    """Rank 1 alone takes more than the limit, between its first backward pass and the update."""
    from autofit.training.step import TrainingStep

    original = TrainingStep.update

    def update(self: TrainingStep, *args: Any, **kwargs: Any) -> None:
        import torch

        if data["rendezvous"]["rank"] == 1:
            torch.ones(data["memory_limit_bytes"] // 4 + 1)
        original(self, *args, **kwargs)

    TrainingStep.update = update  # type: ignore[method-assign]


def leaking_on_rank_1(data: Mapping[str, Any]) -> None:
    """Rank 1 alone finds 16 MiB more in use after every step."""
    from autofit.trial.measure.meter import CpuMeter

    grown = itertools.count()
    rank = data["rendezvous"]["rank"]
    CpuMeter.in_use = lambda self: rank * next(grown) * 16 * 1024**2  # type: ignore[method-assign]


def says_threads(data: Mapping[str, Any]) -> None:
    """Fails in its first update, with the number of threads that it is made with."""
    from autofit.training.step import TrainingStep

    def update(self: TrainingStep, *args: Any, **kwargs: Any) -> None:
        import torch

        raise ValueError(f"{torch.get_num_threads()} threads, OpenMP {os.environ.get('OMP_NUM_THREADS')}")

    TrainingStep.update = update  # type: ignore[method-assign]


def never_synchronises(data: Mapping[str, Any]) -> None:
    """Each rank updates the weights with its own gradients."""
    from autofit.training.engines.local import DdpEngine

    original = DdpEngine.prepare
    DdpEngine.prepare = lambda self, *, last: original(self, last=False)  # type: ignore[method-assign]


CHANGES = {
    f.__name__: f
    for f in (
        leaves_segment,
        leaves_swap,
        uneven_clocks,
        entries.crawling,
        nan_on_rank_1,
        greedy_on_rank_1,
        leaking_on_rank_1,
        says_threads,
        never_synchronises,
    )
}
FATES = {f.__name__: f for f in (rank_1_dies, rank_1_hangs, rank_1_raises, rank_0_is_deaf)}
FATES_OF = {"fsdp_fails": {"fsdp": rank_1_hangs, "fsdp-no-reshard": rank_1_dies}}
