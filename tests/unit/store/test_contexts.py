"""The version of a context: it changes with every trial that the context gets, and with no other."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread

import pytest
from leases import expire
from unit.store.conftest import WORKLOAD, a_trial, context

from autofit.core.outcome import OutOfMemory
from autofit.store import Store, export_lines, import_lines
from autofit.store.contexts import renew

OTHER = replace(WORKLOAD, seq_len=4096)


def version(store: Store, workload: object = WORKLOAD) -> str:
    trial = a_trial(workload=workload)
    return store.version(hardware_key=trial.hardware.key, workload_key=trial.workload.key)


def test_a_trial_changes_the_version_of_its_own_context_alone(store: Store) -> None:
    nothing = version(store)
    store.add(a_trial())
    first = version(store)
    store.add(a_trial(workload=OTHER))
    assert nothing != first == version(store)
    other, whole = version(store, OTHER), store.version()
    store.add(a_trial())
    assert version(store) not in (nothing, first)
    assert version(store, OTHER) == other
    assert store.version() != whole


def test_another_stack_is_part_of_the_answer(store: Store) -> None:
    store.add(a_trial())
    first, trial = version(store), a_trial()
    store.add(replace(trial, stack=replace(trial.stack, torch="2.99.0")))
    assert version(store) != first
    stacks = store.stacks(trial.hardware.key, trial.workload.key)
    assert [stack.torch for stack in stacks] == ["2.99.0", trial.stack.torch]
    store.add(a_trial())
    stacks = store.stacks(trial.hardware.key, trial.workload.key)
    assert [stack.torch for stack in stacks] == [trial.stack.torch, "2.99.0"], "the most recently used first"


def test_what_is_imported_changes_versions(store: Store, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Store.open(str(tmp_path_factory.mktemp("other") / "store.db")) as other:
        other.add(a_trial())
        other.add(a_trial(workload=OTHER))
        lines = list(export_lines(other))
    before = version(store), version(store, OTHER)
    import_lines(store, lines)
    after = version(store), version(store, OTHER)
    assert all(one != two for one, two in zip(before, after, strict=True))
    import_lines(store, lines)
    assert after == (version(store), version(store, OTHER)), "nothing was added"


def test_no_two_writers_leave_the_same_version(store: Store) -> None:
    """Whoever reads a version after a commit must see another one after the next."""
    versions: list[str] = []

    def write() -> None:
        for _ in range(5):
            store.add(a_trial())
            versions.append(version(store))

    writers = [Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    count, _, newest = version(store).partition("-")
    assert (int(count), int(newest)) == (20, max(t.trial_id or 0 for t in store.trials()))


def test_of_two_writers_at_once_the_earlier_trial_may_be_committed_last(store: Store) -> None:
    one, other = (context(a_trial(workload=workload)) for workload in (WORKLOAD, OTHER))
    for trial in (a_trial(), a_trial(workload=OTHER), a_trial()):
        store.add(trial)
    with store._database.write() as connection:
        renew(connection, {(one["hardware_key"], one["stack_key"], one["workload_key"]): 1})
    newest_first = [workload.key for workload in store.workloads()]
    assert newest_first == [one["workload_key"], other["workload_key"]]


def test_outcomes_are_counted(store: Store) -> None:
    assert store.outcomes() == {}
    ran_out = a_trial(outcome=OutOfMemory(reason="tried", phase="backward"))
    for trial in (a_trial(), a_trial(), ran_out, a_trial(workload=OTHER)):
        store.add(trial)
    assert store.outcomes() == {"fits": 3, "out_of_memory": 1}
    of_other = {"workload_key": OTHER.key}
    assert (store.count(), store.count(**of_other), store.count(**of_other, outcome="out_of_memory")) == (4, 1, 0)


def test_how_the_searches_are_doing(store: Store) -> None:
    assert store.queue.status().searches == {}
    store.queue.submit(digest="d", workload=WORKLOAD, request={"asked": {}}, hardware_name="t4")
    waiting = store.queue.status()
    assert (waiting.searches, waiting.lease_age_seconds) == ({"queued": 1}, 0.0)
    assert store.queue.claim("a:1:0", ["t4"]) is not None
    running = store.queue.status()
    assert (running.searches, running.waited_seconds) == ({"running": 1}, 0.0)
    expire(store)
    assert store.queue.status().lease_age_seconds > running.lease_age_seconds, "nobody has renewed it"
