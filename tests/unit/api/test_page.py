"""The web page: what its parts say and carry, how errors look, and who may do what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from unit.operations.made_trials import HARDWARE, MADE, MODEL, OPTIONS, fill, fits, make_job, make_trial

from autofit import export
from autofit.api.app import create_app
from autofit.api.middleware.bodies import BODY_BYTES
from autofit.api.page.static import NAMES
from autofit.core.lengths import Lengths
from autofit.core.units import GIB
from autofit.operations import WorkloadOptions
from autofit.operations.service.prediction_process import Overloaded
from autofit.store import Store

TOKEN = "correct-horse-battery-staple"
QUERY = f"model={MODEL}&seq_len=128&global_batch=4&hardware=h100-80g"
HTMX = {"HX-Request": "true"}
SEARCH = {"model": MODEL, "seq_len": "128", "global_batch": "4", "hardware": "h100-80g", "time_budget": "1h"}

PAGES = {
    "/": ["Measured so far", "h100-80g", "128 x 4"],
    f"/frontier?{QUERY}": ["4,000 tokens/s", "40.00 GiB of headroom", "recommended", "/point/5", 'id="chart"'],
    f"/frontier?{QUERY}&memory_limit=25GiB&seed=": ["2,000 tokens/s", "(over the limit)"],
    f"/hardware?{QUERY}&price.h100-80g=3.60": ["0.25", "4,000"],
    "/hardware": ["4,000"],
    "/point/5": ["4,000 tokens/s in 40.00 GiB", "precision", "as in the plain recipe"],
    "/point/4": ["out of memory", "tried to allocate 2.00 GiB (in backward)"],
    "/point/6": ["crashed", "Segmentation fault"],
    "/calculator": ["micro_batch", "rtx-4090", 'hx-trigger="load, input delay:250ms"'],
    "/calculator?method=lora": ["llama-3.1-8b", "rtx-4090"],
    "/searches": ["None yet", "Time budget"],
    "/login": ["Token"],
}
"""Page, to parts of it."""
ERRORS = {
    "/frontier?model=smolm2-135m": (400, "did you mean smollm2-135m"),
    "/frontier?model=/etc/passwd": (400, "unknown model"),
    "/frontier": (400, "model"),
    f"/frontier?{QUERY}&memory_limit=24": (400, "did you mean 24GiB?"),
    f"/frontier?{QUERY}&memory_limit=1GiB": (200, "the closest takes 2.00 GiB"),
    f"/frontier?model={MODEL}&seq_len=256": (404, "autofit search --model smollm2-135m --seq-len 256"),
    f"/frontier/points?model={MODEL}&seq_len=256": (404, "has not been measured"),
    f"/hardware?{QUERY}&price.h100-80g=free": (400, "price &#39;free&#39; is not understood"),
    f"/hardware?{QUERY}&price.h100-80g=nan": (400, "is not understood"),
    "/point/999": (404, "there is no trial 999"),
    "/point/first": (400, "trial_id"),
    "/point/4/export/trl": (400, "has not fitted"),
    "/point/5/export/tlr": (400, "did you mean trl"),
    "/searches/none": (404, "there is no search"),
    "/calculator/answer?method=lara": (400, "did you mean lora"),
    "/calculator/answer?model=/etc/passwd": (400, "unknown model"),
    "/static/none.js": (404, "Not Found"),
}
"""Page, to the status and a part of what it says."""
ESTIMATE = {
    "fits": True, "certainty": "likely", "hardware": "rtx-4090", "device_bytes": 9 * GIB,
    "memory_limit_bytes": 24 * GIB, "headroom_bytes": 15 * GIB, "tokens_per_second": 2314.0, "relative_error": 0.5,
    "lightest": None,
    "breakdown": {"weights": 6 * GIB, "logits_and_loss": 3 * GIB, "context": 0},
    "advice": [
        {"roles": ["fastest"], "change": {"micro_batch": 8}, "effect": "exact",
         "estimate": {"device_bytes": 12 * GIB, "headroom_bytes": 12 * GIB, "tokens_per_second": 2500.0}},
    ],
}  # fmt: skip
"""As the estimating process returns it."""


@pytest.fixture
def app(store: Store, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """The application with the operator's token, in which nothing is traced."""
    app = create_app(store, token=TOKEN, closed=False)
    calls: list[Any] = []
    app.state.calls = calls

    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(partial(function, *arguments, **named))
        return ESTIMATE

    for process in (app.state.estimating, app.state.predicting):
        monkeypatch.setattr(process, "call", call)
        monkeypatch.setattr(process, "warm", lambda: None)
    return app


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    """A browser that anyone may use, and that follows redirects."""
    with TestClient(app, raise_server_exceptions=False) as opened:
        yield opened


@pytest.fixture
def closed(store: Store) -> Iterator[TestClient]:
    """A browser of a server that wants a token, which does not follow redirects."""
    with TestClient(create_app(store, token=TOKEN), headers={"Accept": "text/html"}, follow_redirects=False) as opened:
        yield opened


def login(client: TestClient, token: str = TOKEN, following: str = "/searches") -> Any:
    return client.post("/login", data={"token": token, "next": following}, follow_redirects=False)


@pytest.mark.parametrize("path", PAGES)
def test_a_page(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert [part for part in PAGES[path] if part not in answer.text] == []
    for landmark in ("<header>", "<nav aria-label", '<main id="main"', "<footer>", '<html lang="en">', "<h1>"):
        assert answer.text.count(landmark) == 1
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert not re.search(r"<script(?![^>]* src=)|\son\w+=", answer.text)


@pytest.mark.parametrize("path", ERRORS)
def test_an_error_is_a_sentence(client: TestClient, path: str) -> None:
    status, part = ERRORS[path]
    for headers in ({}, HTMX):
        answer = client.get(path, headers=headers)
        assert answer.status_code == status
        if path.startswith("/static/"):
            continue
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert part.lower() in answer.text.lower() and "Traceback" not in answer.text
        assert ("<html" in answer.text) is not bool(headers)


def test_the_unforeseen_is_a_sentence(client: TestClient, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(app.state.estimating, "call", fail)
    answer = client.get("/calculator/answer")
    assert (answer.status_code, "secret" in answer.text, "the server&#39;s log" in answer.text) == (500, False, True)


def test_nothing_is_loaded_from_elsewhere(client: TestClient) -> None:
    texts = [client.get(path).text for path in PAGES]
    ours = [name for name in NAMES if name != "plotly.min.js"]
    texts += [client.get(f"/static/{name}").text for name in ours]
    for text in texts:
        assert re.findall(r"""(?:src|href|action)\s*=\s*["']?(?:https?:)?//[^"']*""", text) == []
        assert re.findall(r"""(?:url\(|@import|fetch\(|import\()\s*["']?(?:https?:)?//""", text) == []


def test_files_are_served_by_their_types_and_no_others_are(client: TestClient) -> None:
    page = client.get(f"/frontier?{QUERY}").text
    addresses = re.findall(r'"(/static/[^"]+)"', page)
    assert {address.partition("?")[0].rpartition("/")[2] for address in addresses} == set(NAMES)
    types = {".css": "text/css", ".svg": "image/svg+xml"}
    for address in addresses:
        answer = client.get(address)
        kind = next((type_ for ending, type_ in types.items() if ending in address), "javascript")
        assert answer.status_code == 200 and kind in answer.headers["content-type"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert (".js" not in address) or answer.headers["content-encoding"] == "gzip"
        assert client.get(address, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    for other in ("widgetbundle.js", "datasets/iris.csv.gz", "../page.py", "", "."):
        assert client.get(f"/static/{other}").status_code == 404


def test_names_are_escaped(store: Store, client: TestClient) -> None:
    hostile = "<script>alert(1)</script>"
    trial = store.trials()[0]
    workload = replace(trial.workload, model=hostile)
    kept = store.add(replace(trial, workload=workload, hardware=replace(trial.hardware, name='"><script>')))
    store.queue.submit(digest="d", workload=workload, request={"asked": {}}, hardware_name=hostile)
    search_id = store.searches()[0].search_id
    for path in ("/", "/searches", f"/searches/{search_id}", f"/point/{kept.trial_id}", f"/hardware?model={hostile}"):
        text = client.get(path).text
        assert "&lt;script&gt;" in text and "<script>" not in text
    assert "<script>" not in client.get(f"/frontier?model={hostile}").text


def test_a_limit_changes_the_answer_alone(client: TestClient) -> None:
    answer = client.get(f"/frontier?{QUERY}&memory_limit=12GiB", headers=HTMX)
    assert "1,000 tokens/s" in answer.text and "<html" not in answer.text
    restored = client.get(f"/frontier?{QUERY}", headers={**HTMX, "HX-History-Restore-Request": "true"})
    assert "<html" in restored.text


def test_what_the_chart_draws(client: TestClient) -> None:
    chart = client.get(f"/frontier/points?{QUERY}").json()
    full = chart["methods"]["full"]
    assert full["frontier"]["gib"] == [10, 20, 40] and full["frontier"]["id"] == [1, 2, 5]
    assert list(zip(full["others"]["gib"], full["others"]["out"], strict=True)) == [(24, False), (80, True)]
    assert list(chart["methods"]) == ["full", "lora", "qlora"]


def test_a_point_has_every_export(client: TestClient) -> None:
    page = client.get("/point/5").text
    for format in export.FORMATS:
        path = f"/point/5/export/{format}"
        assert f'hx-get="{path}"' in page
    for format in ("json", "accelerate"):  # the others load libraries
        text = client.get(f"/point/5/export/{format}", headers=HTMX).text
        assert f'data-copy="export-{format}"' in text and f'<pre id="export-{format}"' in text


def test_bytes_by_kind(client: TestClient, app: FastAPI) -> None:
    text = client.get("/point/5/bytes", headers=HTMX).text
    assert "logits and loss" in text and "6.00 GiB" in text and "context" not in text
    assert app.state.calls[0].args[1]["precision"] == "bf16"


def test_bytes_by_kind_of_sequences_with_lengths(client: TestClient, app: FastAPI, store: Store) -> None:
    options = WorkloadOptions(model=MODEL, seq_len=512, global_batch=4, lengths=Lengths.of([20, 30, 400]))
    added = store.add(make_trial({"method": "lora", "micro_batch": 1}, fits(3.0, 700.0), job=make_job(options)))
    assert client.get(f"/point/{added.trial_id}/bytes", headers=HTMX).status_code == 200
    assert app.state.calls[0].args[0].resolve()[1] == added.workload


def test_hardware_side_by_side(client: TestClient, store: Store) -> None:
    t4 = replace(HARDWARE, name="t4", device_name="Tesla T4", memory_bytes=15 * GIB)
    fill(store, MADE[:1], job=make_job(hardware=t4))
    text = client.get(f"/hardware?model={MODEL}&price.t4=0.36").text
    rows = re.findall(r'<th scope="row"><a href="/frontier[^>]*>([^<]+)', text)
    assert rows == ["h100-80g", "t4"] and "0.1<" in text
    longer = replace(OPTIONS, seq_len=256)
    store.add(make_trial({}, fits(6, 900), job=make_job(longer, hardware=t4)))
    assert "This workload has not been measured here" in client.get(f"/hardware?model={MODEL}").text


def test_lengths_stay_with_every_question(store: Store, client: TestClient) -> None:
    options = WorkloadOptions(model=MODEL, seq_len=512, global_batch=4, lengths=Lengths.of([20, 30, 400]))
    store.add(make_trial({"method": "lora", "micro_batch": 1}, fits(3.0, 700.0), job=make_job(options)))
    start = client.get("/").text
    link = next(part for part in re.findall(r'href="(/frontier[^"]*)"', start) if "lengths=" in part)
    page = client.get(link.replace("&amp;", "&")).text
    assert "700" in page and 'name="lengths" value="20,30,400"' in page
    number = re.search(r"/point/(\d+)", page)
    assert number is not None
    assert "400 tokens at most, 150 in the mean" in client.get(number[0]).text
    login(client)
    filled = {**SEARCH, "seq_len": "400", "lengths": "20,30,400"}
    assert client.post("/searches", data=filled, headers=HTMX).status_code == 200
    assert store.searches()[0].workload == options.resolve()[1]


def test_the_calculator(client: TestClient, app: FastAPI) -> None:
    query = "model=llama-3.1-8b&hardware=rtx-4090&seq_len=512&method=full&rank=8&micro_batch=2&precision="
    text = client.get(f"/calculator/answer?{query}", headers=HTMX).text
    assert "Likely fits rtx-4090" in text and "9.00 GiB of 24.00 GiB" in text and "give or take 50 %" in text
    call = app.state.calls[0]
    assert (call.args[0].seq_len, call.args[1]) == (512, {"method": "full", "micro_batch": 2})
    assert call.keywords["advice"] is False
    assert "micro_batch=8" in client.get(f"/calculator/advice?{query}", headers=HTMX).text
    assert app.state.calls[1].keywords["advice"] is True


def test_a_busy_calculator_says_so(client: TestClient, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **named: Any) -> None:
        raise Overloaded("too many predictions are asked for at once", remedy="ask again in a minute")

    monkeypatch.setattr(app.state.estimating, "call", refuse)
    answer = client.get("/calculator/answer", headers=HTMX)
    assert (answer.status_code, "ask again in a minute" in answer.text) == (503, True)


def test_a_search_is_started_watched_and_cancelled(client: TestClient, store: Store) -> None:
    refused = client.post("/searches", data=SEARCH, headers=HTMX)
    assert (refused.status_code, "/login?next=%2Fsearches" in refused.text) == (401, True)
    assert login(client).headers["location"] == "/searches"
    started = client.post("/searches", data={**SEARCH, "memory_limit": "", "space": ""}, headers=HTMX)
    (search,) = store.searches()
    path = f"/searches/{search.search_id}"
    assert (started.status_code, started.headers["hx-redirect"]) == (200, path)
    assert search.search_id in client.get("/searches").text
    page = client.get(path).text
    assert "waits for a free runner with h100-80g" in page and f'data-events="/v1{path}/events"' in page
    assert client.post(f"{path}/cancel", headers=HTMX).headers["hx-redirect"] == path
    assert "cancelled" in client.get(path, headers=HTMX).text
    assert [one.action for one in store.access.audit()] == ["cancel", "search"]


def test_who_cancels_is_told_that_a_search_goes_on_for_others(client: TestClient, store: Store) -> None:
    ann, bob = ({"Authorization": f"Bearer {store.access.create(name, 'run')}", **HTMX} for name in ("ann", "bob"))
    path, _ = (client.post("/searches", data=SEARCH, headers=who).headers["hx-redirect"] for who in (ann, bob))
    assert "others" in client.post(f"{path}/cancel", headers=bob).text
    assert client.post(f"{path}/cancel", headers=ann).headers["hx-redirect"] == path


def test_a_form_that_is_too_large_is_a_sentence(client: TestClient) -> None:
    login(client)
    answer = client.post("/searches", data={**SEARCH, "space": "x" * BODY_BYTES}, headers=HTMX)
    assert (answer.status_code, "bytes" in answer.text) == (413, True)


@pytest.mark.parametrize(("given", "part"), [({"time_budget": "soon"}, "soon"), ({"seq_len": "many"}, "seq_len")])
def test_a_wrong_search_is_a_sentence(client: TestClient, store: Store, given: dict[str, str], part: str) -> None:
    login(client)
    answer = client.post("/searches", data={**SEARCH, **given}, headers=HTMX)
    assert (answer.status_code, part in answer.text, store.searches()) == (400, True, [])


def test_a_search_shows_its_result(client: TestClient, store: Store) -> None:
    trial = store.trials()[4]
    search_id = store.queue.submit(digest="d", workload=trial.workload, request={"asked": {}}, hardware_name="h100-80g")
    lease = store.queue.claim("a:1:0")
    assert lease is not None
    answer = client.get(f"/v1/recommendation?{QUERY}").json()
    store.queue.end(lease, "succeeded", {"recommendation": answer})
    text = client.get(f"/searches/{search_id}").text
    assert "4,000 tokens/s in 40.00 GiB" in text and "/point/5" in text and "See the frontier" in text


def test_a_cookie_changes_nothing_without_a_header(client: TestClient, store: Store) -> None:
    """Another site's form may be sent with it by an old browser."""
    login(client)
    for path in ("/searches", "/v1/searches"):
        assert client.post(path, data=SEARCH).status_code == 401
    assert store.searches() == []
    assert client.get("/v1/trials").status_code == 200


def test_a_closed_server_asks_for_a_token(closed: TestClient) -> None:
    answer = closed.get(f"/frontier?{QUERY}")
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/login?next=%2Ffrontier%3Fmodel%3D")
    partial = closed.get(f"/frontier?{QUERY}", headers=HTMX)
    assert (partial.status_code, partial.headers["hx-redirect"]) == (401, "/login")
    program = closed.get("/v1/trials", headers={"Accept": "*/*"})
    assert (program.status_code, program.headers["content-type"]) == (401, "application/problem+json")
    assert closed.get("/login").status_code == closed.get("/static/page.css").status_code == 200


def test_a_token_is_kept_in_a_cookie(closed: TestClient, store: Store) -> None:
    assert login(closed, "wrong").status_code == 401
    for token in (TOKEN, store.access.create("reader", "read")):
        answer = login(closed, token, f"/frontier?{QUERY}")
        assert (answer.status_code, answer.headers["location"]) == (303, f"/frontier?{QUERY}")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and "; secure" not in cookie
        assert closed.get("/").status_code == closed.get("/v1/trials").status_code == 200
        closed.post("/logout")
        assert closed.get("/").status_code == 303
    login(closed, store.access.create("other", "read"))
    assert closed.post("/searches", data=SEARCH, headers=HTMX).status_code == 403
    store.access.revoke("other")
    assert closed.get("/").status_code == 303


def test_over_https_the_cookie_is_secure(store: Store) -> None:
    with TestClient(create_app(store, token=TOKEN), base_url="https://testserver") as client:
        assert "; secure" in login(client).headers["set-cookie"].lower()


@pytest.mark.parametrize("away", ["//evil.example", "https://evil.example", "/\\evil.example", "evil", "/\n/evil"])
def test_one_stays_on_this_server(client: TestClient, away: str) -> None:
    assert login(client, following=away).headers["location"] == "/"


def test_another_sites_form_logs_nobody_in(client: TestClient) -> None:
    answer = client.post("/login", data={"token": TOKEN}, headers={"Sec-Fetch-Site": "cross-site"})
    assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)


def test_times_of_an_emulated_card_are_said_to_be_a_virtual_clocks(client: TestClient, store: Store) -> None:
    emulated = make_job(hardware=replace(HARDWARE, name="emulated-h100-80g"))
    kept = store.add(make_trial({"method": "full"}, fits(30, 99), job=emulated))
    for path, said in ((f"/point/{kept.trial_id}", True), (f"/hardware?{QUERY}", True), ("/point/5", False)):
        assert ("virtual clock" in client.get(path).text) is said, path
