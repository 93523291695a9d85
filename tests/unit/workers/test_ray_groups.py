"""Trials of two ranks on real Ray: a placement group for both, and a group that has lost a worker is built anew."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest
from jobs import tiny_job, tiny_request
from tiny import STACK
from unit.workers.test_ray_pool import actor_processes, completed

from autofit.core.device.hardware import Hardware
from autofit.core.device.probe import COLLECTIVES
from autofit.core.errors import EnvironmentLacks
from autofit.core.outcome import Crashed, Fits, TimedOut
from autofit.core.units import GIB
from autofit.techniques import complete
from autofit.techniques.job import ranks_per_host
from autofit.training.distributed.rendezvous import LOOPBACK
from autofit.trial.limits.shared_memory import is_mapped
from autofit.trial.machine import cores
from autofit.trial.machine.detection import cpu
from autofit.trial.machine.device_lock import GivenUp, held
from autofit.trial.request import TrialRequest
from autofit.workers.cluster.demand import Demand, DeviceRequest
from autofit.workers.ray_pool import RayPool
from autofit.workers.slots import trial_actor
from autofit.workers.slots.missing import MissingRequirements
from autofit.workers.slots.running_trial import RunningTrial
from autofit.workers.slots.slot import Slot, StartFailed
from autofit.workers.slots.slot_set import SlotSet
from autofit.workers.slots.trial_actor import TrialActor, rendezvous_at
from autofit.workers.slots.worker_starter import WorkerStarter


@pytest.fixture(scope="module")
def pool() -> Iterator[RayPool]:
    """A private Ray whose one group of workers shares this machine's cores."""
    pool = RayPool(device="cpu", devices=2)
    pool.site()
    yield pool
    pool.close()


def on_two(**request: float) -> TrialRequest:
    return tiny_request(complete({"sharding": "ddp", "micro_batch": 1}), job=tiny_job(devices=2), **request)


def trials_processes() -> list[psutil.Process]:
    """What the workers' fork servers have started for the trial that runs."""
    parents = [child for actor in actor_processes() for child in actor.children()]
    return [child for parent in parents for child in parent.children()]


def wait_for_ranks() -> None:
    """Until the trial that was submitted has a process for each rank."""
    while len(trials_processes()) < 2:
        time.sleep(0.02)


def shared_memory() -> set[Path]:
    """This user's segments that no process has mapped."""
    segments = [path for path in Path("/dev/shm").iterdir() if path.is_file() and path.stat().st_uid == os.getuid()]
    return {path for path in segments if not is_mapped(path)}


def listened_on() -> set[int]:
    """Ports on which the workers, and what they have started, listen."""
    every = [process for actor in actor_processes() for process in (actor, *actor.children(recursive=True))]
    return {c.laddr.port for process in every for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_one_group_takes_the_machine(pool: RayPool) -> None:
    assert pool.size == 1
    assert pool.site()[0].key == cpu().key
    (table,) = pool._ray.util.placement_group_table().values()
    assert table["strategy"] == "STRICT_PACK" and table["state"] == "CREATED"
    assert [bundle["CPU"] for bundle in table["bundles"].values()] == [pool._ray.cluster_resources()["CPU"] // 2] * 2


def test_a_trial_takes_both_ranks(pool: RayPool) -> None:
    for _ in range(2):
        pool.submit(on_two())
        (done,) = completed(pool)
        assert isinstance(done.outcome, Fits), done.outcome
        assert [hardware.rank for hardware in done.outcome.measurement.ranks] == [0, 1]
    assert pool.wait(0.0) == []


def test_a_lost_worker_costs_the_others_of_its_group_too(pool: RayPool) -> None:
    pool.submit(on_two(timing_seconds=3.0))
    wait_for_ranks()
    before = {process.pid for process in actor_processes()}
    actor_processes()[1].send_signal(signal.SIGKILL)
    (done,) = completed(pool)
    assert isinstance(done.outcome, Crashed) and done.outcome.worker_lost, done.outcome
    pool.submit(on_two())
    (done,) = completed(pool)
    assert isinstance(done.outcome, Fits), done.outcome
    assert not before & {process.pid for process in actor_processes()}, "both ranks have new workers"
    assert len(pool._ray.util.placement_group_table()) == 2, "the first group and its successor"


def test_a_rank_that_dies_or_hangs_ends_its_trial_and_no_other(pool: RayPool) -> None:
    segments, ports = shared_memory(), listened_on()
    for sent, kind, deadline in ((signal.SIGKILL, Crashed, 3600.0), (signal.SIGSTOP, TimedOut, 6.0)):
        pool.submit(on_two(timing_seconds=3600.0, deadline_seconds=deadline))
        wait_for_ranks()
        workers = {process.pid for process in actor_processes()}
        trials_processes()[1].send_signal(sent)
        (done,) = completed(pool)
        assert isinstance(done.outcome, kind), done.outcome
        assert done.outcome.reason.startswith("rank "), done.outcome
        assert not trials_processes(), "zombies are listed, too"
        until = time.monotonic() + 10
        while not shared_memory() <= segments and time.monotonic() < until:
            time.sleep(0.1)  # other programs' semaphores come and go
        assert shared_memory() <= segments
        assert listened_on() == ports
    pool.submit(on_two())
    (done,) = completed(pool)
    assert isinstance(done.outcome, Fits), done.outcome
    assert {process.pid for process in actor_processes()} == workers


def test_as_many_ranks_share_a_host_as_their_group_has_on_one() -> None:
    """Each worker sees one device, its own."""
    placed = Slot(
        demand=Demand(ranks=4, bundle={}, selector={}, strategy="PACK"),
        placement=None,
        node_ids=("a", "b", "a", "a"),
    )
    hardware = Hardware(name="h100-80g", kind="cuda", device_name="NVIDIA H100", memory_bytes=1, host_memory_bytes=GIB)
    placed.heard = [(hardware, STACK)] * 4
    placed.accept()
    assert placed.site == (replace(hardware, count=3), STACK)
    assert ranks_per_host(replace(tiny_job(devices=4), hardware=placed.site[0])) == 3


def test_a_node_is_left_out_after_three_failed_starts_however_many_ranks_it_has() -> None:
    wanted = DeviceRequest(ranks=8, uses_gpus=True)
    slots = SlotSet(
        ray=None,
        wanted=wanted,
        workers=None,
        is_private=True,
        starter=WorkerStarter(ray=None, device="cuda", driver=None),
        missing=MissingRequirements(ray=None),
    )
    left_out = []
    for _ in range(3):
        demand = Demand(ranks=8, bundle={}, selector={}, strategy="STRICT_PACK")
        slots.slots = [Slot(demand=demand, placement=None, node_ids=("a",) * 8)]
        slots._refuse(slots.slots[0], StartFailed("Ray's worker failed", remedy="run it again"))
        left_out.append(set(wanted.left_out))
    assert left_out == [set(), set(), {"a"}]


def test_ranks_wait_for_their_devices_as_long_as_the_queue_has_left() -> None:
    actors = [MagicMock() for _ in range(2)]
    RunningTrial(on_two(wait_seconds=600.0), actors, worker="a", queued_seconds=500.0)
    assert actors[0].listen.remote.call_args.args[0] == 100.0
    assert actors[1].run.remote.call_args.args[0]["wait_seconds"] == 100.0


def test_devices_are_free_again_where_no_place_to_meet_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial does not run then, which would release them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    actor = TrialActor("cpu")
    actor.site(starts=False)
    where = [(LOOPBACK, ["cpu"])] * 2
    monkeypatch.setattr(actor._runner, "listen", MagicMock(side_effect=OSError("no port")))
    monkeypatch.setattr(trial_actor, "listening", MagicMock(side_effect=OSError("no port")))
    for meet in (actor.listen, actor.listen_to_measure):
        with pytest.raises(OSError, match="no port"):
            meet(60.0, *where)
        with held(["cpu"], most_seconds=0.0):
            pass


def test_devices_are_held_while_ranks_measure_what_goes_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # so that it comes back: workers take it away
    actors = [TrialActor("cpu") for _ in range(2)]
    for actor in actors:
        actor.site(starts=False)
    place = actors[0].listen_to_measure(60.0, *[(LOOPBACK, ["cpu"])] * 2)
    with pytest.raises(GivenUp), held(["cpu"], most_seconds=0.0):
        pass
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda actor, rank: actor.between(place, rank), actors, range(2)))
    assert all(isinstance(answer, dict) and answer.keys() == set(COLLECTIVES) for answer in answers), answers
    with held(["cpu"], most_seconds=0.0):
        pass


def test_a_worker_with_another_autofit_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with pytest.raises(EnvironmentLacks, match="and another drives the search"):
        TrialActor("cpu", version="another").site(starts=False)


@pytest.mark.parametrize(("rank", "share"), [(0, 16), (1, 5), (2, 5), (3, 5)])
def test_ranks_divide_the_cores_of_their_own_machine(rank: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cores", lambda: 16)
    place = {"host": "10.0.0.1", "port": 1, "addresses": ["10.0.0.1", *["10.0.0.2"] * 3]}
    assert cores.threads_per_rank(replace(cpu(), kind="cuda"), rendezvous_at(place, rank)) == share
    assert cores.threads_per_rank(replace(cpu(), cores=16), rendezvous_at(place, rank)) == share
    beside = cores.threads_per_rank(replace(cpu(), kind="cuda"), rendezvous_at(place, rank), sharing=8)
    assert beside == 2, "other trials run on the machine's other devices"
