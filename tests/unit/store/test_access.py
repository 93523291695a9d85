"""Tokens and the audit, in both kinds of database."""

from __future__ import annotations

import pytest
from leases import begin, expire
from unit.store.conftest import a_trial

from autofit.core.errors import UsageError
from autofit.store import OPERATOR, QueueFull, Store


def queued(store: Store, by: str | None, digest: str = "d", key: str | None = None) -> str:
    request, workload = {"asked": {"model": "m"}}, a_trial().workload
    return store.queue.submit(digest=digest, workload=workload, request=request, hardware_name="t4", by=by, key=key)


def test_a_token_is_known_until_it_is_revoked(store: Store) -> None:
    assert not store.access.any_valid()
    secret = store.access.create("ann", "run")
    token = store.access.bearer(secret)
    assert token is not None and (token.name, token.scope) == ("ann", "run")
    assert store.access.any_valid()
    assert [store.access.bearer(wrong) for wrong in ("", secret[:-1], secret + "x", "autofit_")] == [None] * 4
    store.access.revoke("ann")
    assert store.access.bearer(secret) is None
    assert not store.access.any_valid()
    (token,) = store.access.tokens()
    assert token.revoked_at is not None


def test_what_is_stored_is_no_token(store: Store) -> None:
    secret = store.access.create("ann", "read")
    assert secret not in str([token.to_json() for token in store.access.tokens()])


def test_a_name_is_used_once(store: Store) -> None:
    store.access.create("ann", "read")
    store.access.revoke("ann")
    with pytest.raises(UsageError, match="there is, or was, a token called 'ann'"):
        store.access.create("ann", "read")
    for name in ("", "  ", OPERATOR, "a\0b"):
        with pytest.raises(UsageError):
            store.access.create(name, "read")
    with pytest.raises(UsageError, match="did you mean run"):
        store.access.create("bob", "runs")
    with pytest.raises(UsageError, match="did you mean ann"):
        store.access.revoke("anne")


def test_what_is_started_and_cancelled_is_written_down_once(store: Store) -> None:
    search_id = queued(store, "ann")
    assert queued(store, "ann") == queued(store, "bob") == queued(store, None) == search_id
    assert [store.access.has_asked(name, search_id) for name in ("ann", "bob", "eve")] == [True, True, False]
    for _ in range(2):
        store.queue.cancel(search_id, by="ann")
    assert [(a.token, a.action, a.search_id) for a in store.access.audit()] == [
        ("ann", "cancel", search_id),
        ("bob", "search", search_id),
        ("ann", "search", search_id),
    ]
    (newest,) = store.access.audit(limit=1)
    assert [a.token for a in store.access.audit(before=newest.number)] == ["bob", "ann"]


def test_a_search_ends_with_the_last_token_that_asks_for_it(store: Store) -> None:
    search_id = queued(store, "ann")
    queued(store, "bob")
    for name in ("bob", "bob"):
        store.queue.cancel(search_id, by=name, for_all=False)
    queued(store, "bob")  # who comes back asks again
    for name, state in (("ann", "queued"), ("bob", "cancelled")):
        store.queue.cancel(search_id, by=name, for_all=False)
        assert store.searches()[0].state == state
    actions = [(a.token, a.action) for a in store.access.audit()][::-1]
    assert actions == [
        ("ann", "search"),
        ("bob", "search"),
        ("bob", "cancel"),
        ("bob", "search"),
        ("ann", "cancel"),
        ("bob", "cancel"),
    ]


def test_who_joins_a_command_line_cannot_end_its_search(store: Store) -> None:
    begin(store, a_trial(), "d")
    assert queued(store, "ann") == "d"
    store.queue.cancel("d", by="ann", for_all=False)
    assert store.searches()[0].state == "running"
    expire(store)  # it is not there any more
    store.queue.cancel("d", by="ann", for_all=False)
    assert store.searches()[0].state == "cancelled"


def test_who_has_joined_a_command_line_and_withdrawn_hands_nothing_to_runners(store: Store) -> None:
    lease = begin(store, a_trial(), "d")
    queued(store, "ann")
    store.queue.cancel("d", by="ann", for_all=False)
    store.queue.interrupt(lease, {})
    assert store.searches()[0].state == "cancelled"


def test_a_repeated_key_asks_for_nothing_again(store: Store) -> None:
    search_id = queued(store, "ann", key="k")
    queued(store, "bob")
    store.queue.cancel(search_id, by="ann", for_all=False)
    assert queued(store, "ann", key="k") == search_id
    store.queue.cancel(search_id, by="bob", for_all=False)
    assert store.searches()[0].state == "cancelled"


def test_a_revoked_token_holds_no_search(store: Store) -> None:
    store.access.create("ann", "run")
    search_id = queued(store, "ann")
    queued(store, "bob")
    store.access.revoke("ann")
    store.queue.cancel(search_id, by="bob", for_all=False)
    assert store.searches()[0].state == "cancelled"


def test_what_a_token_has_withdrawn_from_takes_no_place_in_its_queue(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autofit.store.searches.queue.MOST_WAITING", 1)
    first = queued(store, "ann")
    with pytest.raises(QueueFull):
        queued(store, "ann", "another")
    queued(store, "bob")
    store.queue.cancel(first, by="ann", for_all=False)
    assert queued(store, "ann", "another") != first
