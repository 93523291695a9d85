"""A pool on a cluster whose nodes join, leave, differ and are others': it goes on with what it has."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from jobs import tiny_job
from ray.core.generated import autoscaler_pb2
from ray.experimental import internal_kv
from unit.workers.made_workers import (
    MadeCluster,
    collected,
    made_actor,
    made_cluster,
    made_probe,
    request_of,
    size_of,
    until,
)

from autofit.catalog.hardware import card
from autofit.catalog.models import load
from autofit.core.device.probe import between, link_rate
from autofit.core.errors import EnvironmentLacks
from autofit.core.outcome import Crashed, OutOfMemory, worker_was_lost
from autofit.core.units import GIB
from autofit.prediction import machine_link
from autofit.prediction.calibration import Calibration
from autofit.prediction.estimation import Estimation
from autofit.store import Store
from autofit.techniques import complete
from autofit.trial.machine.device_lock import NOT_BEGUN
from autofit.workers.slots import slot_set, worker_starter


@pytest.fixture(scope="module")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeCluster]:
    with made_cluster(tmp_path_factory.mktemp("trials")) as cluster:
        yield cluster


@pytest.fixture
def cluster(one_cluster: MadeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeCluster]:
    """The cluster without nodes."""
    one_cluster.folder = tmp_path
    monkeypatch.setattr(worker_starter, "TrialActor", made_actor(tmp_path))
    monkeypatch.setattr(slot_set, "RENEW_SECONDS", 0.1)
    yield one_cluster
    one_cluster.clear()


def test_a_lost_worker_costs_its_trial_and_the_others_go_on(cluster: MadeCluster) -> None:
    """As a search meets it: the lost trial is asked for again while every other worker is busy."""
    first, _ = cluster.add(), cluster.add()
    pool = cluster.open()
    until(lambda: pool.site() and pool._slots.renew() is None and pool.size == 2)
    pool.submit(request_of(1))
    pool.submit(request_of(2))
    until(lambda: cluster.began(1) and cluster.began(2), pool)
    on_first = next(s for s in pool._slots.up if s.node_ids == (first.node_id,))
    assert on_first.running is not None
    lost = size_of(on_first.running.request)
    cluster.remove(first)
    ((request, attempt),) = collected(pool)
    assert size_of(request) == lost
    assert isinstance(attempt.outcome, Crashed) and attempt.outcome.transient and attempt.outcome.worker_lost
    assert "node has died" in attempt.outcome.reason, attempt.outcome.reason
    assert pool.size == 1
    pool.submit(request)
    cluster.let_end(1, 2)
    assert sorted(size_of(request) for request, _ in collected(pool, 2)) == [1, 2]
    assert cluster.began(lost) == 2, "on the other worker, whatever became of the node"


def test_without_a_node_trials_wait_for_the_next_and_not_for_ever(
    cluster: MadeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = cluster.add()
    pool = cluster.open()
    pool.site()
    cluster.remove(only)
    until(lambda: pool._lost() is not None and not pool._slots.up)
    pool.submit(request_of(1))
    cluster.let_end(1)
    until(lambda: pool._slots.none_since, pool)
    another = cluster.add()
    ((_, attempt),) = collected(pool)
    assert isinstance(attempt.outcome, OutOfMemory)
    monkeypatch.setattr(slot_set, "NODES_SECONDS", 0.0)
    pool.submit(request_of(2))
    cluster.remove(another)
    ((_, attempt),) = collected(pool)
    assert isinstance(attempt.outcome, Crashed) and attempt.outcome.worker_lost
    pool.submit(request_of(2))
    with pytest.raises(EnvironmentLacks, match=r"lost its last worker .*it resumes"):
        until(lambda: False, pool)


def test_a_second_search_waits_its_turn_and_both_grow_with_the_cluster(
    cluster: MadeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.add()
    first = cluster.open()
    first.site()
    with caplog.at_level(logging.WARNING):
        second = cluster.open()
        until(lambda: second._slots.renew() or caplog.records)
    message = "autofit: others use all GPUs: this search waits its turn"
    assert [record.getMessage() for record in caplog.records] == [message]
    first.submit(request_of(1))
    cluster.add(gpus=3)
    second.site()
    until(lambda: second._slots.renew() or first.size + second.size == 4, first)
    first.close()
    second.submit(request_of(2))
    until(lambda: second.size == 4, second)
    assert len(caplog.records) == 1, "once"
    cluster.let_end(2)
    collected(second)


def test_ranks_share_a_machine_wherever_one_has_as_many_devices(cluster: MadeCluster) -> None:
    cluster.add()
    cluster.add()
    spread = cluster.open(devices=2)
    assert (spread.site()[0].name, spread.site()[0].count) == ("h100-80g", 1)
    cluster.add(gpus=4)
    packed = cluster.open(devices=2)
    assert (packed.site()[0].name, packed.site()[0].count) == ("h100-80g", 2)


def processors_called_cards() -> type:
    """A class in place of `TrialActor`: a real worker, whose processor goes by a card's name, because only the ranks of
    cards are spread over machines."""
    from autofit.workers.slots.trial_actor import TrialActor

    card = made_probe().hardware.to_json()

    class Called(TrialActor):
        def __init__(self, device: str, *others: Any) -> None:
            super().__init__("cpu", *others)

        def site(self, measures: bool = False, starts: bool = True) -> dict[str, Any]:
            return {**super().site(starts=False), "hardware": {**card, "host_memory_bytes": 2**40}}

    return Called


def test_ranks_on_two_machines_measure_their_link_which_changes_what_is_predicted(
    cluster: MadeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_starter, "TrialActor", processors_called_cards())
    cluster.add(address="127.0.0.2")
    with monkeypatch.context() as patch:
        patch.setenv("GLOO_DEVICE_TRANSPORT", "none")
        cluster.add(address="127.0.0.3")
    pool = cluster.open(devices=2)
    hardware, stack = pool.site()
    job = replace(tiny_job(load("smollm2-135m"), devices=2), hardware=hardware, stack=stack)
    config = complete({"sharding": "zero3"})

    def predicted_seconds(store: Store) -> float:
        calibration = Calibration.of(job, store)
        estimation = Estimation(calibration=calibration, config=config, memory_limit_bytes=GIB, store=store.url)
        return estimation.estimate().step_seconds or 0.0

    with Store.open(str(tmp_path / "store.db")) as store:
        machine_link.make_sure(job, store, pool)
        (said,) = caplog.messages
        assert "the link between machines could not be measured: " in said and "the ranks cannot meet" in said
        before = predicted_seconds(store)
        pool._ray.kill(pool._slots.up[0].actors[1])
        lost = pool.link()
        assert lost is not None and lost.failure and not lost.figures
        pool.close()
        cluster.remove(cluster.nodes[1])
        cluster.add(address="127.0.0.4")
        pool = cluster.open(devices=2)
        assert pool.site()[0] == hardware
        machine_link.make_sure(job, store, pool)
        kept = store.probes.find_link(between(hardware, 2), hardware_key=hardware.key, stack_key=stack.key)
        assert kept is not None and kept.failure is None
        assert {min(kept.figures.values())} == {link_rate(kept.figures, kept.name)}
        assert predicted_seconds(store) > before > 0.0
    assert caplog.messages[1].startswith("autofit: between machines: ")


def test_the_first_gpu_node_is_waited_for_and_no_cpu_taken_in_its_place(cluster: MadeCluster) -> None:
    """Where a GPU is asked for, and where the autoscaler says that it may add one."""
    cluster.add(gpus=0)
    asked_for = cluster.open(device="cuda")
    assert not cluster.open()._slots.wanted.uses_gpus
    group = autoscaler_pb2.NodeGroupConfig(resources={"GPU": 8}, min_count=0, max_count=2, name="gpus")
    config = autoscaler_pb2.ClusterConfig(node_group_configs=[group]).SerializeToString()
    place = ray._raylet.GCS_AUTOSCALER_CLUSTER_CONFIG_KEY, ray._raylet.GCS_AUTOSCALER_STATE_NAMESPACE
    internal_kv._internal_kv_put(place[0], config, overwrite=True, namespace=place[1])
    try:
        promised = cluster.open()
    finally:
        internal_kv._internal_kv_del(place[0], namespace=place[1])
    cluster.add(gpus=2)
    for pool in (asked_for, promised):
        assert pool.site()[0].kind == "cuda" and pool.size >= 1


def test_of_a_mixed_cluster_only_the_named_card_is_used(cluster: MadeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """As far as Ray's types say it, nothing starts elsewhere; where they do not, what a worker has shows it."""
    cluster.add(kind="GeForce-RTX-3090", has="rtx-3090")
    right = cluster.add(kind="GeForce-RTX-4090", has="rtx-4090", host_gib="100")
    pool = cluster.open(card=card("rtx-4090"), workers=2)
    hardware, _ = pool.site()
    assert (hardware.name, hardware.host_memory_bytes) == ("rtx-4090", 100 * GIB)
    assert not caplog.records
    large = cluster.open(card=card("a100-80g"), workers=2)
    cluster.add(kind="A100", has="a100-40g")
    until(lambda: large._slots.renew() or len(caplog.records) == 2)
    assert "is left out: the workers there have a100-40g, and the search is for a100-80g" in caplog.text
    cluster.add(kind="A100", has="a100-80g")
    assert large.site()[0].name == "a100-80g"
    labelled = {"autofit.io/hardware": "h100-pcie-80g"}
    cluster.add(kind="H100", has="h100-80g")
    cluster.add(kind="H100", has="h100-pcie-80g", **labelled)
    pcie = cluster.open(card=card("h100-pcie-80g"))
    assert pcie.site()[0].name == "h100-pcie-80g"
    assert [slot.node_ids for slot in pool._slots.up] == [(right.node_id,)]
    assert len(caplog.records) == 2


def test_a_node_with_other_libraries_or_none_is_left_out(
    cluster: MadeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Most have one version."""
    cluster.add(torch="2.12")
    cluster.add(gpus=2, torch="2.13")
    cluster.add(broken="yes")
    pool = cluster.open()
    assert pool.site()[1].torch == "2.13"
    until(lambda: pool._slots.renew() or (pool.size == 2 and len(caplog.records) == 2))
    assert "the library versions there differ" in caplog.text
    assert "torch is not installed (install it)" in caplog.text


def test_a_trial_over_several_machines_blames_only_the_one_that_fails(
    cluster: MadeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its node, as all nodes of the tests are of one machine: at the start, and when a worker is lost."""
    monkeypatch.setattr(slot_set.SlotSet, "host", lambda slots, node_id: node_id)
    broken, _ = cluster.add(broken="yes"), cluster.add()
    pool = cluster.open(devices=2)
    until(lambda: pool._slots.renew() or pool._slots.wanted.left_out)
    assert pool._slots.wanted.left_out == {broken.node_id}
    cluster.add()
    pool.submit(request_of(1))
    until(lambda: cluster.began(1) == 2, pool)
    ((slot, _),) = pool._busy.items()
    cluster.remove(next(node for node in cluster.nodes if node.node_id == slot.node_ids[1]))
    ((_, attempt),) = collected(pool)
    assert attempt.node == slot.node_ids[1] and attempt.node in attempt.outcome.reason


def test_where_no_worker_can_start_the_reason_is_given(cluster: MadeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_set, "NODES_SECONDS", 0.0)
    cluster.add(broken="yes")
    with pytest.raises(EnvironmentLacks, match="torch is not installed"):
        cluster.open().site()


def test_a_trial_is_of_the_hardware_that_ran_it_and_gets_its_share_of_the_cores(cluster: MadeCluster) -> None:
    """Also while drivers are upgraded node by node."""
    cluster.add(host_gib="32", driver="570")
    cluster.add(gpus=2, host_gib="512", driver="580")
    pool = cluster.open()
    pool.site()
    for size in (1, 2, 4):
        pool.submit(request_of(size))
    until(lambda: all(cluster.began(size) for size in (1, 2, 4)), pool)
    cluster.let_end(1, 2, 4)
    ended = [(request.trial(attempt), attempt.outcome) for request, attempt in collected(pool, 3)]
    ran = sorted((t.hardware.host_memory_bytes // GIB, t.stack.driver, o.reason) for t, o in ended)
    assert ran == [(32, "570", "sharing 1"), (512, "580", "sharing 2"), (512, "580", "sharing 2")]


def test_what_is_not_needed_is_given_back_and_asked_for_again(
    cluster: MadeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add(gpus=2)
    pool = cluster.open(workers=3)
    pool.submit(request_of(1))
    until(lambda: len(pool._slots.up) == 2, pool)
    assert len(pool._slots.slots) == 3, "an autoscaler may add a node for one more"
    monkeypatch.setattr(slot_set, "IDLE_SECONDS", 0.0)
    until(lambda: len(pool._slots.slots) == 1, pool)
    assert pool.size == 3, "as many trials may still be asked for"
    other = cluster.open()
    other.site()
    assert len(other._slots.up) == 1
    other.close()
    pool.submit(request_of(2))
    until(lambda: cluster.began(2), pool)
    cluster.let_end(1, 2)
    collected(pool, 2)


def test_a_trial_that_no_worker_was_free_for_is_not_begun(cluster: MadeCluster) -> None:
    cluster.add()
    pool = cluster.open()
    pool.submit(request_of(1))
    until(lambda: cluster.began(1), pool)
    pool.submit(request_of(2, wait_seconds=0.1))
    ((request, attempt),) = collected(pool)
    assert size_of(request) == 2 and NOT_BEGUN in attempt.outcome.reason
    cluster.let_end(1)
    collected(pool)


def test_on_cpus_each_trial_takes_a_machine_of_its_own(cluster: MadeCluster) -> None:
    """Machines that differ in size, of which the larger one would have room for several."""
    nodes = [cluster.add(gpus=0, cpus=2), cluster.add(gpus=0, cpus=16)]
    pool = cluster.open()
    pool.site()
    pool.submit(request_of(1))
    until(lambda: pool.size == 2, pool)
    placed = [slot.node_ids for slot in pool._slots.slots]
    assert sorted(placed) == sorted((node.node_id,) for node in nodes)
    until(lambda: cluster.began(1), pool)
    ((slot, running),) = pool._busy.items()
    _, attempt = pool._lose(slot, running, 0, ray.exceptions.OutOfMemoryError("the node was running low on memory"))
    assert isinstance(attempt.outcome, OutOfMemory) and attempt.outcome.host, "which is no failure of the machinery"


def test_what_ray_ends_for_a_shared_machine_s_memory_is_run_again(cluster: MadeCluster) -> None:
    """Any of those that run there may have taken it."""
    alone, _ = cluster.add(), cluster.add(gpus=2)
    pool = cluster.open()
    until(lambda: pool._slots.renew() or pool.size == 3)
    for size in (1, 2, 4):
        pool.submit(request_of(size))
    until(lambda: not any(node.free_gpus for node in pool._slots.nodes), pool)
    for slot, running in sorted(pool._busy.items(), key=lambda busy: busy[0].node_ids != (alone.node_id,))[:2]:
        low = ray.exceptions.OutOfMemoryError("the node was running low on memory")
        _, attempt = pool._lose(slot, running, 0, low)
        assert worker_was_lost(attempt.outcome) == (slot.node_ids != (alone.node_id,))


def workers_of(search_id: str) -> set[str]:
    """The epochs of the search's workers."""
    every = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in every if actor["namespace"] == worker_starter.NAMESPACE]
    return {name.split("/")[1] for name in names if name.startswith(f"{search_id}/")}


def test_who_takes_a_search_over_ends_the_workers_of_its_earlier_driver(cluster: MadeCluster) -> None:
    cluster.add(gpus=3)
    earlier, other = cluster.open(workers=1), cluster.open(workers=1)
    for pool, name, size in ((earlier, "aa", 1), (other, "aab", 2)):
        pool.site()
        reserved = [slot.placement for slot in pool._slots.slots]
        pool.claim(name, 9)
        assert [slot.placement for slot in pool._slots.slots] == reserved, "a turn that was waited for is not lost"
        pool.submit(request_of(size))
        until(lambda pool=pool, size=size: cluster.began(size), pool)  # type: ignore[misc]
    successor = cluster.open(workers=1)
    successor.site()
    successor.claim("aa", 10)
    ((_, attempt),) = collected(earlier)
    assert isinstance(attempt.outcome, Crashed) and attempt.outcome.worker_lost
    successor.submit(request_of(4))
    cluster.let_end(2, 4)
    for pool in (other, successor):
        ((_, attempt),) = collected(pool)
        assert isinstance(attempt.outcome, OutOfMemory)
    assert "10" in workers_of("aa") and workers_of("aab") == {"9"}
    earlier.claim("aa", 9)
    successor.submit(request_of(4))
    assert isinstance(collected(successor)[0][1].outcome, OutOfMemory), "not ended by one that is superseded"


@pytest.mark.parametrize(
    ("lacks", "message"), [("yes", "on that machine: nothing is compiled"), ("dies", "Ray's worker failed")]
)
def test_a_node_that_lacks_what_the_first_ones_had_is_left_out(
    cluster: MadeCluster, caplog: pytest.LogCaptureFixture, lacks: str, message: str
) -> None:
    """The configs of a search were chosen by what those had."""
    cluster.add()
    pool = cluster.open()
    config = complete({"offload": "optimizer", "micro_batch": 1, "precision": "bf16"})
    assert pool.cannot(config, request_of(1).job) is None
    cluster.add(lacks=lacks)
    cluster.add()
    until(lambda: pool._slots.renew() or (pool.size == 2 and caplog.records))
    assert f"is left out: {message}" in caplog.text


def test_a_node_that_is_slower_than_its_like_gets_no_more_trials(
    cluster: MadeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """What it runs goes on, and is told apart by its worker. A node that cannot measure itself is used all the same."""
    cluster.add(speed="0.61")
    pool = cluster.open()
    pool.site()
    pool.claim("aa", 1)
    pool.submit(request_of(1))
    until(lambda: cluster.began(1), pool)
    assert not pool.set_aside, "there is nothing to compare it with"
    cluster.add(speed="1")
    cluster.add()
    until(lambda: pool.set_aside and pool.size == 3, pool)
    ((slow, why),) = pool.set_aside.items()
    assert "is slow: products in bf16 run there at 61% of the speed usual for h100-80g here" in why
    assert f"{why}: its trials are set aside" in caplog.text
    assert "is not compared with the others: the driver hangs" in caplog.text
    cluster.let_end(1, 2, 4)
    ((_, attempt),) = collected(pool)
    assert attempt.worker == slow
    assert pool.size == 2
    for size in (2, 4, 2):
        pool.submit(request_of(size))
    assert slow not in {attempt.worker for _, attempt in collected(pool, 3)}
    until(lambda: pool._slots.renew() is None and pool.size == 2)


def test_a_slow_node_is_used_as_long_as_there_is_no_other(
    cluster: MadeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Here by what the store knows of such a device."""
    cluster.add(speed="0.5")
    pool = cluster.open()
    pool.claim("aa", 1, made_probe())
    pool.submit(request_of(1))
    cluster.let_end(1)
    collected(pool)
    assert "it is used all the same, as there is no other" in caplog.text and not pool.set_aside
    cluster.add(speed="0.9")
    until(lambda: pool._slots.renew() or pool.set_aside)
    assert pool.size == 1


def test_a_worker_that_is_left_out_gets_no_more_trials_and_the_others_of_its_node_do(
    cluster: MadeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it is idle by then or has begun another; the last one is kept."""
    bad = cluster.add(gpus=3)
    pool = cluster.open()
    until(lambda: pool._slots.renew() or pool.size == 3)
    busy, idle, other = (slot.name for slot in pool._slots.up)
    pool.submit(request_of(1))
    until(lambda: cluster.began(1), pool)
    assert pool.leave_out(busy, "the device is gone") and pool.leave_out(idle, "the device is gone")
    assert not pool.leave_out(other, "the device is gone") and not pool.leave_out("", "the device is gone")
    assert [record.getMessage().endswith("is left out: the device is gone") for record in caplog.records] == [True]
    cluster.let_end(1, 2, 4)
    ((_, attempt),) = collected(pool)
    assert attempt.worker == busy and pool.leave_out(busy, "the device is gone"), "as it was"
    for size in (2, 4):
        pool.submit(request_of(size))
    assert {attempt.worker for _, attempt in collected(pool, 2)} == {other}
    another = cluster.add()
    until(lambda: pool._slots.renew() or len([slot for slot in pool._slots.slots if slot.is_placed]) == 2)
    assert pool.leave_out(other, "the device is gone"), "one that is starting will do"
    pool.submit(request_of(2))
    collected(pool)
    assert [slot.node_ids for slot in pool._slots.up] == [(another.node_id,)]
    assert pool._slots.wanted.left_out == {bad.node_id}
