"""Who may drive a search: one driver at a time, and none that has lost its lease."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from leases import a_gone_process, begin, expire, submit
from sqlalchemy import event, text
from unit.store.conftest import a_trial

from autofit import __version__
from autofit.core.errors import StoreError
from autofit.store import Heartbeat, KeyReused, LeaseLost, Store, UnderWay, new_owner
from autofit.store.searches.lease import pid_namespace

RACES = 1000


def states(store: Store) -> list[str]:
    return [search.state for search in store.searches()]


def test_every_race_for_a_lease_has_one_winner(store: Store) -> None:
    search_id = submit(store, a_trial())
    with ThreadPoolExecutor(2) as threads:
        for race in range(1, RACES + 1):
            leases = [lease for lease in threads.map(store.queue.claim, ("a:1:0", "b:1:0")) if lease]
            assert [lease.epoch for lease in leases] == [race]
            expire(store)
    events = store.queue.events(search_id)
    assert [e.seq for e in events] == list(range(1, RACES + 2)) and {e.kind for e in events[1:]} == {"running"}


def test_a_driver_that_was_overtaken_changes_nothing(store: Store) -> None:
    submit(store, a_trial())
    first = store.queue.claim("a:1:0")
    assert first is not None and store.queue.claim("b:1:0") is None
    store.add(a_trial(), lease=first)
    expire(store)
    store.add(a_trial(), lease=first)  # nobody has taken it yet
    second = store.queue.claim("b:1:0")
    assert second is not None and (second.epoch, second.spent_trials) == (2, 2)
    before = (store.searches(), store.trials(), store.queue.events(first.search_id))
    for attempt in (
        lambda: store.add(a_trial(), lease=first),
        lambda: store.queue.renew(first, 1.0),
        lambda: store.queue.give_back(first, "why not"),
        lambda: store.queue.end(first, "succeeded", {}),
    ):
        with pytest.raises(LeaseLost):
            attempt()
    assert not store.queue.is_held(first) and store.queue.is_held(second)
    assert before == (store.searches(), store.trials(), store.queue.events(first.search_id))


def test_a_trial_says_where_by_what_and_under_which_lease_it_was_stored(store: Store) -> None:
    store.add(replace(a_trial(), node="node-1"), lease=begin(store, a_trial()))
    with store._database.read() as connection:
        (row,) = connection.execute(text("SELECT node, autofit_version, search_epoch FROM trials")).all()
    assert tuple(row) == ("node-1", __version__, 1)


def test_a_lease_is_kept_by_renewing_it(store: Store) -> None:
    submit(store, a_trial())
    lease = store.queue.claim("a:1:0")
    assert lease is not None
    expire(store)
    assert not store.searches()[0].held
    store.queue.renew(lease, 3.5)
    assert store.queue.claim("b:1:0") is None
    assert (store.searches()[0].held, store.searches()[0].spent_seconds) == (True, 3.5)


def test_what_a_process_left_that_has_ended_is_taken_at_once(store: Store) -> None:
    submit(store, a_trial())
    left, taken = store.queue.claim(a_gone_process()), store.queue.claim("b:1:0")
    assert left is not None and taken is not None and taken.epoch == 2


def test_what_this_process_holds_is_free_once_its_lease_has_expired_or_its_driver_ended(store: Store) -> None:
    """A runner claims searches for drivers that are processes of their own, and several runners may share a process."""
    submit(store, a_trial())
    assert store.queue.claim(new_owner()) is not None and store.queue.claim(new_owner()) is None
    expire(store)
    taken = store.queue.claim(new_owner())
    assert taken is not None and taken.epoch == 2
    with Heartbeat(store.queue, taken):
        assert store.queue.claim(new_owner()) is None
    assert store.queue.claim(new_owner()) is not None, "its driver was in this process, and has ended"


def test_what_a_process_of_another_container_holds_is_not_taken(store: Store) -> None:
    """Containers of one pod have one host name; an earlier version did not say which it was."""
    submit(store, a_trial())
    gone = a_gone_process()
    for owner in (gone.replace(f"{pid_namespace()}-", "1-"), gone.replace(f"{pid_namespace()}-", "")):
        assert store.queue.claim(owner) is not None and store.queue.claim("b:1:0") is None
        expire(store)


def test_a_runner_takes_what_its_hardware_can_run_oldest_first(store: Store) -> None:
    trial = a_trial()
    other = replace(trial, hardware=replace(trial.hardware, name="t4"))
    ids = [submit(store, each_trial, digest) for each_trial, digest in ((trial, "1"), (other, "2"), (trial, "3"))]
    begin(store, trial, "of the command line")
    expire(store)
    claims: list[tuple[str, list[str] | None]] = [
        ("a:1:0", ["t4"]),
        ("b:1:0", ["t4"]),
        ("c:1:0", None),
        ("d:1:0", None),
    ]
    taken = [store.queue.claim(owner, names) for owner, names in claims]
    assert [lease and lease.search_id for lease in taken] == [ids[1], None, ids[0], ids[2]]
    assert store.queue.claim("e:1:0") is None, "what a command line began, only a command line resumes"


def test_a_runner_goes_on_with_what_a_command_line_began_once_it_is_asked_for(store: Store) -> None:
    trial = a_trial()
    begin(store, trial, "d1", question="q")
    assert submit(store, trial) == "d1"
    assert store.queue.claim("a:1:0") is None, "its command line drives it"
    expire(store)
    lease = store.queue.claim("a:1:0", [trial.hardware.name])
    assert lease is not None and (lease.search_id, lease.epoch) == ("d1", 2)
    assert store.searches()[0].request == {"question": "q", "asked": {}}


@pytest.mark.parametrize("joined", [False, True])
def test_an_interrupted_command_line_ends_its_search_for_itself_only(store: Store, joined: bool) -> None:
    lease = begin(store, a_trial(), "d1")
    if joined:
        submit(store, a_trial())
    store.queue.interrupt(lease, {"stopped_because": "Ctrl-C"})
    assert states(store) == ["queued" if joined else "cancelled"]
    assert store.queue.events("d1")[-1].kind == states(store)[0]
    assert (store.queue.claim("a:1:0") is not None) == joined


def test_the_same_is_queued_once(store: Store) -> None:
    trial = a_trial()
    with ThreadPoolExecutor(8) as threads:
        ids = set(threads.map(lambda _: submit(store, trial), range(8)))
    assert len(ids) == len(store.searches()) == 1
    lease = store.queue.claim("a:1:0")
    assert lease is not None and {submit(store, trial)} == ids
    store.queue.end(lease, "succeeded", None)
    assert submit(store, trial) not in ids


def test_a_key_stands_for_one_search(store: Store) -> None:
    first = submit(store, a_trial(), key="k")
    store.queue.cancel(first)
    assert submit(store, a_trial(), key="k") == first
    with pytest.raises(KeyReused, match="'k' was used for another request"):
        submit(store, a_trial(), "another", key="k")
    assert states(store) == ["cancelled"]


def test_a_key_is_kept_of_whoever_joins_and_each_token_has_its_own(store: Store) -> None:
    first = submit(store, a_trial(), by="ann", key="k")
    assert submit(store, a_trial(), by="bob", key="k") == submit(store, a_trial(), by="bob", key="k2") == first
    store.queue.cancel(first)
    assert {submit(store, a_trial(), by="bob", key=key) for key in ("k", "k2")} == {first}
    with pytest.raises(KeyReused):
        submit(store, a_trial(), "another", by="bob", key="k2")
    assert submit(store, a_trial(), "another", by="ann", key="k2") != first


def test_a_command_line_joins_no_search_that_is_driven(store: Store) -> None:
    trial = a_trial()
    first = begin(store, trial, owner="a:1:0")
    assert begin(store, trial, owner="a:1:0") == first, "after a commit that was not answered it is no second driver"
    with pytest.raises(UnderWay, match="s1, driven by a:1:0"):
        begin(store, trial, owner="b:1:0")
    expire(store)
    assert begin(store, trial, owner="b:1:0").epoch == 2


@pytest.mark.parametrize("driven", [False, True])
def test_cancelling_ends_a_search_for_whoever_drives_it(store: Store, driven: bool) -> None:
    search_id = submit(store, a_trial())
    lease = store.queue.claim("a:1:0") if driven else None
    for _ in range(2):
        store.queue.cancel(search_id)
    assert states(store) == ["cancelled"]
    assert [e.kind for e in store.queue.events(search_id)] == ["queued", *["running"] * driven, "cancelled"]
    assert store.queue.claim("b:1:0") is None
    if lease is not None:
        with pytest.raises(LeaseLost):
            store.add(a_trial(), lease=lease)


def test_what_is_given_back_goes_on_with_what_was_spent(store: Store) -> None:
    submit(store, a_trial())
    lease = store.queue.claim("a:1:0")
    assert lease is not None
    store.queue.renew(lease, 7.0)
    store.add(a_trial(), lease=lease)
    store.queue.give_back(lease, "its driver was interrupted")
    again = store.queue.claim("b:1:0")
    assert again == replace(lease, epoch=2, owner="b:1:0", spent_seconds=7.0, spent_trials=1)


def test_hardware_is_known_from_trials_and_from_runners(store: Store) -> None:
    trial = store.add(a_trial())
    for name in ("t4", "t4", "a40"):
        store.queue.announce(replace(trial.hardware, name=name))
    assert store.queue.hardware_names() == sorted(["a40", "t4", trial.hardware.name])
    assert store.hardware() == [trial.hardware]


def test_a_schema_that_changes_meanwhile_is_noticed(store: Store, url: str) -> None:
    trial = store.add(a_trial())
    with store._database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for use in (lambda: store.add(trial), store.searches, lambda: list(store.stream())):
        with pytest.raises(StoreError, match=r"now has schema 9999.*start it again"):
            use()


@pytest.fixture
def losing(store: Store) -> Iterator[list[str]]:
    """Statements that begin with one of these words have the server end their connection, once each."""
    due: list[str] = []

    def lose(connection: object, cursor: object, statement: str, *rest: object) -> None:
        for words in due:
            if statement.startswith(words):
                due.remove(words)
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")  # type: ignore[attr-defined]

    event.listen(store._database.engine, "before_cursor_execute", lose)
    yield due


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_lost_connection_is_made_again(store: Store, losing: list[str]) -> None:
    trial = a_trial()
    losing += ["INSERT INTO trials", "SELECT trials.id", "SELECT searches", "UPDATE searches", "INSERT INTO estimates"]
    search_id = submit(store, trial)
    lease = store.queue.claim("a:1:0")
    assert lease is not None
    store.estimates.keep({"0" * 64: {"fits": True}})
    stored = store.add(trial, lease=lease)
    assert [t.trial_id for t in store.trials()] == [stored.trial_id]
    assert [e.seq for e in store.queue.events(search_id)] == [1, 2, 3]
    assert losing == []
