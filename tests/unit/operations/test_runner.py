"""What a runner says of a search whose drivers die."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from leases import submit
from unit.operations.made_trials import fits, make_trial
from unit.workers.made_workers import made_cluster

from autofit.catalog.hardware import card
from autofit.core.errors import UsageError
from autofit.operations.service import driver, runner
from autofit.store import Lease, Store, new_owner
from autofit.workers.cluster import offer
from autofit.workers.cluster.nodes import HARDWARE_LABEL

LAST_WORDS = f"the head has gone\n{runner.STACK}\n/lib/libc.so.6(+0x1098ec) [0x7f0b8df278ec]\n"
"""As Ray ends a process that has lost its head."""


def test_the_reason_of_a_driver_that_ray_has_ended_is_no_address(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_DEATHS", 1)
    monkeypatch.setattr(runner, "DRIVER", ("-c", f"import sys; sys.stderr.write({LAST_WORDS!r}); sys.exit(1)"))
    search_id = submit(store, make_trial({}, fits(1.0, 100.0)))
    running = runner.Runner(store.url, search_id=search_id)
    thread = threading.Thread(target=running.run)
    thread.start()
    while (result := store.search(search_id)) is None or result.state != "failed":
        time.sleep(0.05)
    running.stop()
    thread.join()
    assert result.result == {"reason": "its driver ended with exit code 1: the head has gone"}


def test_deaths_of_drivers_count_and_restarts_do_not(store: Store) -> None:
    search_id = submit(store, make_trial({}, fits(1.0, 100.0)))
    result = runner.Runner(store.url, search_id=search_id)

    def claimed() -> Lease:
        lease = store.queue.claim(new_owner())
        assert lease is not None
        return lease

    def state() -> str:
        search = store.search(search_id)
        assert search is not None
        return search.state

    for _ in range(runner.MOST_DEATHS):
        store.queue.give_back(claimed(), "its driver was interrupted")
    for _ in range(runner.MOST_DEATHS - 1):
        result._requeue_or_fail(store, claimed(), -9, "Killed")
        assert state() == "queued"
    stopped = runner.Runner(store.url, search_id=search_id)
    stopped.stop()
    stopped._requeue_or_fail(store, claimed(), -9, "Killed")  # it took too long to end
    assert state() == "queued"
    result._requeue_or_fail(store, claimed(), -9, "Killed")
    assert state() == "failed"


@pytest.mark.parametrize(
    ("here", "claimed"),
    [("h100-80g-500w", ["h100-80g", "h100-80g-500w"]), ("emulated-h100-80g", ["emulated-h100-80g"])],
)
def test_a_card_with_another_power_limit_is_that_card_and_an_emulated_one_is_not(
    store: Store, monkeypatch: pytest.MonkeyPatch, here: str, claimed: list[str]
) -> None:
    trial = make_trial({}, fits(1.0, 100.0))
    machine = replace(trial.hardware, name=here)
    monkeypatch.setattr(runner, "detect", lambda device: (machine, trial.stack))
    names = ["h100-80g", "h200", here]
    ids = {submit(store, replace(trial, hardware=replace(machine, name=name)), digest=name): name for name in names}
    taken: list[str] = []

    def drive(self: runner.Runner, store: Store, lease: Lease) -> None:
        taken.append(ids[lease.search_id])
        store.queue.end(lease, "succeeded", None)
        if taken[-1] == here:
            self.stop()

    monkeypatch.setattr(runner.Runner, "_drive", drive)
    runner.Runner(store.url).run()
    assert taken == claimed


def test_a_runner_outlives_what_passes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a full disk, on which no driver starts."""
    trial = make_trial({}, fits(1.0, 100.0))
    monkeypatch.setattr(runner, "detect", lambda device: (trial.hardware, trial.stack))
    search_id = submit(store, trial)
    attempts: list[int] = []

    def drive(self: runner.Runner, store: Store, lease: Lease) -> None:
        attempts.append(lease.epoch)
        if len(attempts) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        store.queue.end(lease, "succeeded", None)
        self.stop()

    monkeypatch.setattr(runner.Runner, "_drive", drive)
    monkeypatch.setattr(runner, "LEASE_SECONDS", 0.0)
    runner.Runner(store.url).run()
    assert attempts == [1, 2] and store.search(search_id).state == "succeeded"  # type: ignore[union-attr]


def test_a_cluster_is_given_searches_for_what_it_has_or_may_get_alone(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trial = make_trial({}, fits(1.0, 100.0))
    names = ["h100-80g", "l40s", "a10g", "cpu-of-another"]
    ids = {submit(store, replace(trial, hardware=replace(trial.hardware, name=n)), digest=n): n for n in names}
    taken: list[str] = []
    with made_cluster(tmp_path) as cluster:
        cluster.add(kind="H100")
        cluster.add(**{HARDWARE_LABEL: "l40s"})
        running = runner.Runner(store.url, ray_address=cluster.ray_cluster.address)

        def drive(self: runner.Runner, store: Store, lease: Lease) -> None:
            taken.append(ids[lease.search_id])
            store.queue.end(lease, "succeeded", None)

        monkeypatch.setattr(runner.Runner, "_drive", drive)
        monkeypatch.setattr(runner, "OFFER_SECONDS", 0.0)
        thread = threading.Thread(target=running.run)
        thread.start()
        try:
            while "lacks" not in caplog.text or len(taken) < 2:
                time.sleep(0.05)
            assert sorted(taken) == ["h100-80g", "l40s"]
            assert caplog.messages == ["autofit: searches wait for what the cluster lacks: a10g, cpu-of-another"]
            assert store.queue.hardware_names() == ["l40s"], "an H100 may be one of two cards"
            cluster.add(kind="A10G")
            while len(taken) < 3:
                time.sleep(0.05)
        finally:
            running.stop()
            thread.join()
    assert taken[2:] == ["a10g"]


@pytest.mark.parametrize(
    ("addable", "is_possible"), [({"GPU": 8}, True), ({"GPU": 8, "accelerator_type:T4": 8}, False)]
)
def test_what_an_autoscaler_may_add_is_offered(addable: dict[str, float], is_possible: bool) -> None:
    assert offer._may_add(card("h100-80g"), addable) == is_possible
    assert offer._may_add(card("t4"), addable) and not offer._may_add(card("t4"), {"CPU": 8.0})


def test_options_that_exclude_each_other_are_refused_at_once() -> None:
    for options in ({"workers": 0}, {"workers": 2, "in_place": True}, {"ray_address": "auto", "in_place": True}):
        with pytest.raises(UsageError):
            runner.Runner(None, **options)


def test_an_interruption_is_one_whatever_it_has_become(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an import, libraries make errors of their own of it."""
    told_to_end = threading.Event()
    monkeypatch.setattr(driver, "_told_to_end", told_to_end)
    with pytest.raises(ImportError), driver._interrupted_as_told():
        raise ImportError("numpy")
    told_to_end.set()
    with pytest.raises(KeyboardInterrupt), driver._interrupted_as_told():
        raise ImportError("numpy")
