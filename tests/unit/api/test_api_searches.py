"""Searches over HTTP: started once, looked at, cancelled, and followed by their events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from threading import Timer
from typing import Any, get_args

import pytest
from fastapi.testclient import TestClient
from unit.operations.made_trials import MODEL

from autofit.api.app import create_app
from autofit.api.schema import documents
from autofit.core.errors import UsageError
from autofit.operations.service.submission import from_json, to_json
from autofit.store import ENDINGS, Lease, Store

TOKEN = "correct-horse-battery-staple"
ASKED = {"model": MODEL, "seq_len": 128, "global_batch": 4, "memory_limit": "24GiB", "time_budget": "1h"}


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    """A client that bears the server's token."""
    app = create_app(store, token=TOKEN)
    with TestClient(app, raise_server_exceptions=False, headers={"Authorization": f"Bearer {TOKEN}"}) as opened:
        yield opened


def start(client: TestClient, key: str | None = None, **options: Any) -> Any:
    """A search that is accepted."""
    answer = client.post(
        "/v1/searches", json={**ASKED, **options}, headers={} if key is None else {"Idempotency-Key": key}
    )
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/searches/{answer.json()['search_id']}"
    return answer.json()


def claimed(store: Store) -> Lease:
    """The lease of the search that a runner has claimed."""
    lease = store.queue.claim("a:1:0")
    assert lease is not None
    return lease


def events(client: TestClient, search_id: str, after: int | None = None) -> list[Any]:
    """The events of a search's stream, which ends."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    answer = client.get(f"/v1/searches/{search_id}/events", headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    bodies = []
    for block in answer.text.strip().split("\n\n"):
        event = dict(line.split(": ", 1) for line in block.splitlines())
        body = json.loads(event["data"])
        assert (event["id"], event["event"]) == (str(body["seq"]), body["kind"])
        documents.EventAnswer.model_validate(body)
        bodies.append(body)
    return bodies


def test_every_state_is_described() -> None:
    assert get_args(documents.State) == ("queued", "running", *ENDINGS)


def test_the_same_request_is_one_search(client: TestClient, store: Store) -> None:
    first = start(client)
    assert (first["state"], first["waiting_for"]) == ("queued", "a free runner with h100-80g")
    assert start(client, hardware="H100-80G") == first
    assert start(client, seed=1)["search_id"] != first["search_id"]
    lease = claimed(store)
    joined = start(client)
    assert (joined["search_id"], joined["state"], joined["waiting_for"]) == (first["search_id"], "running", None)
    store.queue.end(lease, "succeeded", {"recommendation": {}})
    assert start(client)["search_id"] != first["search_id"]


def test_a_key_stands_for_one_search(client: TestClient, store: Store) -> None:
    first = start(client, "key")
    store.queue.cancel(first["search_id"])
    assert start(client, "key")["search_id"] == first["search_id"]
    other = client.post("/v1/searches", json={**ASKED, "seed": 1}, headers={"Idempotency-Key": "key"})
    assert (other.status_code, other.headers["content-type"]) == (422, "application/problem+json")


def test_an_empty_key_is_none(client: TestClient) -> None:
    assert len({start(client, "", seed=seed)["search_id"] for seed in (0, 1)}) == 2


def test_what_is_asked_reaches_the_runner(client: TestClient, store: Store) -> None:
    options = {"method": "lora", "min_rank": 16, "allow": "training", "max_trials": 3}
    options |= {"space": "smoke", "thorough": True}
    search = store.search(start(client, **options)["search_id"])
    assert search is not None
    request = from_json(search.request["asked"], store="there")
    assert request.workload == replace(request.workload, model=MODEL, seq_len=128, global_batch=4, seed=0)
    assert (request.goal.method, request.goal.min_rank, request.goal.allow.label) == ("lora", 16, "training")
    assert (request.hardware, request.memory_limit_bytes, request.time_budget_seconds) == ("h100-80g", 24 * 2**30, 3600)
    assert (request.max_trials, request.space, request.thorough, request.store) == (3, "smoke", True, "there")


def test_what_an_older_version_has_queued_can_be_driven(client: TestClient, store: Store) -> None:
    """It knew fewer options: these have their usual values."""
    search = store.search(start(client)["search_id"])
    assert search is not None
    asked = {name: value for name, value in search.request["asked"].items() if name not in ("predict", "thorough")}
    assert from_json(asked) == from_json(search.request["asked"])


def test_an_answer_is_told(client: TestClient, store: Store) -> None:
    search_id = start(client)["search_id"]
    lease = claimed(store)
    store.queue.renew(lease, 2.5)
    store.queue.end(lease, "nothing_fits", {"reason": "too large"})
    answer = client.get(f"/v1/searches/{search_id}").json()
    assert (answer["state"], answer["result"]) == ("nothing_fits", {"reason": "too large"})
    assert answer["spent_seconds"] == 2.5


def test_a_search_is_cancelled(client: TestClient, store: Store) -> None:
    search_id = start(client)["search_id"]
    for _ in range(2):
        answer = client.delete(f"/v1/searches/{search_id}")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert store.queue.claim("a:1:0") is None


def test_events_are_resumed_without_a_gap(client: TestClient, store: Store) -> None:
    search_id = start(client)["search_id"]
    lease = claimed(store)
    trial = store.trials()[0]
    store.add(trial, lease=lease)
    end = Timer(0.2, store.queue.end, (lease, "succeeded", {"trials": 1}))
    end.start()
    whole = events(client, search_id)
    end.join()
    assert [e["kind"] for e in whole] == ["queued", "running", "trial", "succeeded"]
    assert [e["seq"] for e in whole] == [1, 2, 3, 4]
    assert whole[2]["body"]["config"] == trial.config.to_json()
    for seen in range(4):
        assert events(client, search_id, seen) == whole[seen:]


WRONG = {
    "a model that is a path": ({"model": "/etc/passwd"}, "unknown model '/etc/passwd'"),
    "a space that is a path": ({"space": "/etc/passwd"}, "unknown space '/etc/passwd'"),
    "a misspelt model": ({"model": "smolm2-135m"}, "did you mean smollm2-135m"),
    "misspelt hardware": ({"hardware": "h10-80g"}, "did you mean h100-80g"),
    "several kinds of hardware": ({"hardware": "h100-80g,l40s"}, "ask for one on each"),
    "a misspelt method": ({"method": "lara"}, "did you mean lora"),
    "a limit above the card's memory": ({"memory_limit": "100GiB"}, "more than the"),
    "a limit without a unit": ({"memory_limit": "24"}, "did you mean 24GiB?"),
    "a time without a unit": ({"time_budget": "soon"}, "soon"),
    "a limit of too many digits": ({"memory_limit": f"{'9' * 5000}GiB"}, "is not understood"),
    "a time of too many digits": ({"time_budget": f"{'9' * 400}d"}, "is not understood"),
    "no trial": ({"max_trials": 0}, "max_trials"),
    "a number for a yes": ({"predict": 1}, "predict: Input should be a valid boolean"),
    "text for a number": ({"seq_len": "128"}, "seq_len: Input should be a valid integer"),
    "an unknown option": ({"modle": "smollm2-135m"}, "modle"),
    "a sequence beyond the model": ({"seq_len": 9000}, "longer than the 8192 positions"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_no_runner_could_search_is_refused(client: TestClient, store: Store, case: str) -> None:
    options, part = WRONG[case]
    answer = client.post("/v1/searches", json={**ASKED, **options})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert part in answer.json()["detail"]
    assert store.searches() == []


def test_what_no_database_can_look_up_is_refused(client: TestClient) -> None:
    search_id = start(client)["search_id"]
    too_high = client.get(f"/v1/searches/{search_id}/events", headers={"Last-Event-ID": str(2**31)})
    for answer in (too_high, client.get("/v1/searches/a%00b"), client.delete("/v1/searches/%F0%9F%98%80")):
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_is_not_there_is_404(client: TestClient) -> None:
    for verb, path in (("GET", "none"), ("DELETE", "none"), ("GET", "none/events")):
        answer = client.request(verb, f"/v1/searches/{path}")
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("token", [None, TOKEN])
def test_without_a_token_nothing_is_started_or_cancelled(store: Store, token: str | None) -> None:
    """A page in a browser could ask a server on loopback, whatever name it uses."""
    with TestClient(create_app(store, token=token), headers={"Host": "localhost"}) as client:
        for answer in (client.post("/v1/searches", json=ASKED), client.delete("/v1/searches/s1")):
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert store.searches() == []


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_where_several_are_known_the_hardware_is_named(client: TestClient, store: Store) -> None:
    """Once `auto` meant the processor of the server itself."""
    path = f"/v1/frontier?model={MODEL}&seq_len=128&global_batch=4"
    assert client.get(path).json()["hardware"]["name"] == "h100-80g"
    trial = store.trials()[0]
    store.add(replace(trial, hardware=replace(trial.hardware, name="t4", device_name="Tesla T4")))
    for answer in (
        client.get(path),
        client.get(f"{path}&hardware=AUTO"),
        client.get("/v1/trials?hardware=Auto"),
        client.post("/v1/searches", json=ASKED),
        client.post("/v1/estimates", json={"model": MODEL, "hardware": "AUTO"}),
    ):
        assert (answer.status_code, answer.json()["detail"]) == (400, "name the hardware: h100-80g, t4")


@pytest.mark.parametrize("name", ["command", "program"])
def test_nobody_has_a_server_run_a_command(client: TestClient, store: Store, name: str) -> None:
    answer = client.post("/v1/searches", json={**ASKED, name: "touch /tmp/here {micro_batch}"})
    assert answer.status_code == 400 and name in answer.text
    query = {"model": MODEL, "seq_len": 128, "global_batch": 4, "hardware": "h100-80g"}
    assert client.get("/v1/recommendation", params={**query, name: "touch"}).status_code == 400
    started = start(client)
    search = store.search(started["search_id"])
    assert search is not None
    # Not even who writes into the store has a runner run one.
    request = from_json({**search.request["asked"], name: "touch /tmp/here"}, store="there")
    assert request.workload.program is None
    with pytest.raises(UsageError, match="run by who gives it"):
        to_json(replace(request, workload=replace(request.workload, program="touch")))
