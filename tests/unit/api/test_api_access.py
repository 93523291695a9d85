"""Who may do what, with which token."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from jobs import model_in
from starlette.datastructures import URL
from starlette.requests import Request
from unit.operations.made_trials import MODEL, fits, make_job, make_trial

from autofit.api.app import create_app
from autofit.api.middleware.bodies import BODY_BYTES
from autofit.core.outcome import Crashed
from autofit.operations import WorkloadOptions
from autofit.store import OPERATOR, Store

SEARCH = {"model": MODEL, "seq_len": 128, "global_batch": 4}
OPERATORS = "correct-horse-battery-staple"


def bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def closed(store: Store) -> TestClient:
    """A client, without a token, of a server beyond loopback whose tokens are the store's."""
    return TestClient(create_app(store, closed=True), raise_server_exceptions=False)


def test_the_operator_may_do_everything(store: Store) -> None:
    client = TestClient(create_app(store, token=OPERATORS), headers=bearing(OPERATORS))
    started = client.post("/v1/searches", json=SEARCH)
    assert started.status_code == 202
    assert client.delete(f"/v1/searches/{started.json()['search_id']}").status_code == 200
    assert [one["token"] for one in client.get("/v1/audit").json()] == [OPERATOR, OPERATOR]


def test_each_scope_allows_what_it_says(store: Store, closed: TestClient) -> None:
    tokens = {scope: bearing(store.access.create(scope, scope)) for scope in ("read", "run", "admin")}
    allowed = {
        scope: [
            closed.get("/v1/trials", headers=headers).status_code,
            closed.post("/v1/searches", json=SEARCH, headers=headers).status_code,
            closed.get("/v1/audit", headers=headers).status_code,
        ]
        for scope, headers in tokens.items()
    }
    assert allowed == {"read": [200, 403, 403], "run": [200, 202, 403], "admin": [200, 202, 200]}
    refused = closed.post("/v1/searches", json=SEARCH, headers=tokens["read"])
    assert refused.headers["content-type"] == "application/problem+json"
    assert "this needs the scope run" in refused.json()["detail"]


def test_a_search_is_cancelled_by_those_who_asked_for_it(store: Store, closed: TestClient) -> None:
    ann, bob, admin = (
        bearing(store.access.create(n, s)) for n, s in (("ann", "run"), ("bob", "run"), ("eve", "admin"))
    )
    one = closed.post("/v1/searches", json=SEARCH, headers=ann).json()["search_id"]
    assert closed.delete(f"/v1/searches/{one}", headers=bob).status_code == 403
    (refused,) = closed.get("/v1/audit?limit=1", headers=admin).json()
    assert (refused["token"], refused["action"], refused["search_id"]) == ("bob", "refused", one)
    earlier = closed.get(f"/v1/audit?before={refused['number']}", headers=admin).json()
    assert [audited["action"] for audited in earlier] == ["search"]
    # Who asks for the same search shares it, and ends it for nobody else.
    assert closed.post("/v1/searches", json=SEARCH, headers=bob).json()["search_id"] == one
    assert closed.delete(f"/v1/searches/{one}", headers=bob).json()["state"] == "queued"
    assert closed.delete(f"/v1/searches/{one}", headers=ann).json()["state"] == "cancelled"
    two = closed.post("/v1/searches", json=SEARCH, headers=ann).json()["search_id"]
    assert two != one
    assert closed.post("/v1/searches", json=SEARCH, headers=bob).json()["search_id"] == two
    assert closed.delete(f"/v1/searches/{two}", headers=admin).json()["state"] == "cancelled"


def test_a_revoked_token_is_refused_at_once(store: Store, closed: TestClient) -> None:
    headers = bearing(store.access.create("ann", "read"))
    assert closed.get("/v1/trials", headers=headers).status_code == 200
    store.access.revoke("ann")
    assert closed.get("/v1/trials", headers=headers).status_code == 401


def test_who_has_no_token_is_not_told_where_the_store_is(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "store.db")) as store:
        secret = store.access.create("ann", "read")
        for file in tmp_path.glob("store.db*"):
            file.write_bytes(b"no database" * 1000)
        answer = TestClient(create_app(store, closed=True)).get("/v1/trials", headers=bearing(secret))
    assert (answer.status_code, answer.json()["title"]) == (503, "Store unavailable")
    assert str(tmp_path) not in answer.text


def test_a_closed_server_tells_nothing_but_that_it_lives(closed: TestClient) -> None:
    paths = ("/healthz", "/readyz", "/metrics", "/v1/trials", "/openapi.json", "/docs")
    assert [closed.get(path).status_code for path in paths] == [200, 200, 401, 401, 401, 401]
    assert closed.post("/v1/estimates", json={"model": MODEL}).status_code == 401


def test_no_name_of_the_host_opens_a_closed_server(
    store: Store, closed: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Accept": "text/html"}
    for host in ("x/static/y?", "localhost/healthz?", "x/healthz#"):
        # As older versions of Starlette read it.
        monkeypatch.setattr(Request, "url", URL(f"http://{host}/v1/trials"))
        assert closed.get("/v1/trials").status_code == 401
        with caplog.at_level(logging.INFO, "autofit.api.requests"):
            sent = closed.get("/v1/trials?limit=1", headers=headers, follow_redirects=False)
        assert sent.headers["location"] == "/login?next=%2Fv1%2Ftrials%3Flimit%3D1"
        assert json.loads(caplog.records[-1].getMessage())["path"] == "/v1/trials"
    reader = bearing(store.access.create("ann", "read"))
    assert "/login?next=%2Fsearches" in closed.post("/searches", headers=reader).text
    tags = [closed.get(f"/v1/trials?limit={limit}", headers=reader).headers["etag"] for limit in (1, 2, 1)]
    assert tags[0] != tags[1] and tags[0] == tags[2], "each question has its own answer"


def test_who_may_not_ask_is_not_told_what_is_wrong_with_it(client: TestClient) -> None:
    assert client.post("/v1/searches", json={"modle": 1}).status_code == 401
    headers = {"Content-Type": "application/json"}
    assert client.post("/v1/searches", content="no JSON", headers=headers).status_code == 401
    assert client.delete("/v1/searches/none").status_code == 401


def test_tokens_are_declared(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    assert described["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert described["paths"]["/v1/searches"]["post"]["security"] == [{"HTTPBearer": []}]
    assert described["paths"]["/readyz"]["get"]["security"] == [{"HTTPBearer": []}, {}], "a token may be left out"


def test_the_documentation_loads_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert addresses and all(address.startswith("http://testserver/") for address in addresses)
    assert [client.get(address).status_code for address in addresses] == [200] * len(addresses)


def test_a_large_body_is_refused_however_it_comes(store: Store) -> None:
    client = TestClient(create_app(store, token=OPERATORS), headers=bearing(OPERATORS))
    large = json.dumps({**SEARCH, "space": "x" * BODY_BYTES}).encode()
    pieces = (large[start : start + 1000] for start in range(0, len(large), 1000))
    for content in (large, pieces):
        answer = client.post("/v1/searches", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["title"]) == (413, "Too large")


def test_models_of_the_servers_own_folder_are_named(store: Store, tmp_path: Path) -> None:
    for place in ("own/tiny", "outside"):
        model_in(tmp_path / place)
    app = create_app(store, token=OPERATORS, models=tmp_path / "own")
    client = TestClient(app, headers=bearing(OPERATORS))
    search = {**SEARCH, "seq_len": 32}
    started = client.post("/v1/searches", json={**search, "model": "tiny"}).json()
    assert started["asked"]["model"] == "tiny", "not where it is here"
    stored = store.search(started["search_id"])
    assert stored is not None and stored.request["asked"]["model"] == str(tmp_path / "own" / "tiny")
    query = {"model": "tiny", "seq_len": 32, "global_batch": 4, "provenance": "measured"}
    (tmp_path / "own" / "broken").mkdir()
    (tmp_path / "own" / "broken" / "config.json").write_text("{")
    for path, name, title in (
        ("/v1/recommendation", "tiny", "Not measured"),
        ("/v1/recommendation", "broken", "Wrong request"),
        ("/frontier", "tiny", None),
    ):
        answer = client.get(path, params={**query, "model": name} if title else {"model": name})
        assert (title is None or answer.json()["title"] == title, name in answer.text) == (True, True)
        assert str(tmp_path) not in answer.text
    lease = store.queue.claim("a:1:0")
    assert lease is not None
    reason = f"nothing in {tmp_path / 'own' / 'tiny'} has weights"
    store.queue.end(lease, "failed", {"reason": reason, "tried": [{"reason": reason}]})
    address = f"/v1/searches/{started['search_id']}"
    for path in (address, f"{address}/events", address.removeprefix("/v1")):
        told = client.get(path).text
        assert "in tiny has weights" in told and str(tmp_path) not in told
    job = make_job(WorkloadOptions(model=str(tmp_path / "own" / "tiny"), seq_len=32, global_batch=4))
    fallen = store.add(make_trial({"method": "lora"}, Crashed(reason=reason, stderr_tail=reason), job=job))
    for path in ("/v1/trials", f"/point/{fallen.trial_id}"):
        told = client.get(path).text
        assert told.count("in tiny has weights") == 2 and str(tmp_path) not in told
    kept = store.add(make_trial({"method": "full"}, fits(1.0, 100.0), job=job))
    exported = client.get("/v1/recommendation", params={**query, "format": "trl"})
    shown = client.get(f"/point/{kept.trial_id}/export/trl")
    for answer in (exported, shown):
        assert answer.status_code == 200, answer.text
        assert "tiny" in answer.text and str(tmp_path) not in answer.text
    for name in ("outside", "../outside", "own/tiny", str(tmp_path / "own" / "tiny"), ".", "..", ""):
        refused = client.post("/v1/searches", json={**search, "model": name})
        assert (refused.status_code, "unknown model" in refused.json()["detail"]) == (400, True), name


def test_too_many_searches_are_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.store.searches.queue.MOST_WAITING", 2)
    client = TestClient(create_app(store, token=OPERATORS), headers=bearing(OPERATORS))
    answers = [client.post("/v1/searches", json={**SEARCH, "seed": seed}) for seed in range(3)]
    assert [a.status_code for a in answers] == [202, 202, 429]
    ann = bearing(store.access.create("ann", "run"))
    assert client.post("/v1/searches", json={**SEARCH, "seed": 2}, headers=ann).status_code == 202, "none of hers waits"
    assert client.post("/v1/searches", json={**SEARCH, "seed": 0}).status_code == 202, "it is there already"


def test_every_request_has_an_id_and_a_line(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    client = TestClient(create_app(store, closed=True), headers=bearing(store.access.create("ann", "run")))
    with caplog.at_level(logging.INFO, "autofit.api.requests"):
        started = client.post("/v1/searches", json=SEARCH).json()["search_id"]
        named = client.get("/v1/searches/none", headers={"X-Request-ID": "mine-1"})
        made = client.get("/v1/trials", headers={"X-Request-ID": "x" * 65})
    assert named.headers["x-request-id"] == "mine-1"
    assert len(made.headers["x-request-id"]) == 32
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    fields = ("request_id", "path", "status", "token", "search_id")
    assert lines[0]["search_id"] == started
    assert [tuple(line[name] for name in fields) for line in lines[1:]] == [
        ("mine-1", "/v1/searches/none", 404, "ann", "none"),
        (made.headers["x-request-id"], "/v1/trials", 200, "ann", None),
    ]
