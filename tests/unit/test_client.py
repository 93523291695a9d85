"""The client against a real server over a store of hand-made trials."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from unit.operations.made_trials import MADE, MODEL, fits, make_job, make_trial

from autofit.api.app import create_app
from autofit.client import Client, RemoteSearch
from autofit.client import search as following
from autofit.client.connection import Unreachable, problem, read_events
from autofit.core.errors import (
    AutofitError,
    EnvironmentLacks,
    Interrupted,
    NothingFits,
    NotMeasured,
    Shortfall,
    StoreError,
    UsageError,
)
from autofit.operations import WorkloadOptions, recommend
from autofit.operations.service.prediction_process import Overloaded
from autofit.store import Lease, Store
from tests.made_stores import put

TOKEN = "correct-horse-battery-staple"
ASKED: dict[str, Any] = {"model": MODEL, "seq_len": 128, "global_batch": 4}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A SQLite store with ten trials."""
    put(tmp_path / "store.db", filled=True)
    with Store.open(str(tmp_path / "store.db")) as opened:
        yield opened


@contextmanager
def serving(store: Store, port: int = 0) -> Iterator[int]:
    """The port of a server in a thread, which has a token."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        config = uvicorn.Config(create_app(store, token=TOKEN), log_level="critical", timeout_graceful_shutdown=0)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def client(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A client that finds the server and its token in the environment."""
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.05)
    with serving(store) as port:
        monkeypatch.setenv("AUTOFIT_URL", f"http://127.0.0.1:{port}/")
        monkeypatch.setenv("AUTOFIT_TOKEN", TOKEN)
        yield Client()


def claimed(store: Store) -> Lease:
    """The lease of the search that a runner has claimed."""
    lease = store.queue.claim("a:1:0")
    assert lease is not None
    return lease


def test_the_client_loads_no_library() -> None:
    code = (
        "import sys; from autofit import Client; Client();"
        "print(*sorted({name.split('.')[0] for name in sys.modules} - {*sys.stdlib_module_names}))"
    )
    before = subprocess.run(
        [sys.executable, "-c", code.replace("from autofit import Client; Client();", "")], **CAPTURED
    )
    after = subprocess.run([sys.executable, "-c", code], **CAPTURED)
    assert set(after.stdout.split()) - set(before.stdout.split()) == {"autofit"}


CAPTURED: dict[str, Any] = {"capture_output": True, "text": True, "check": True}


def test_answers_are_the_apis_documents(client: Client) -> None:
    answer = client.recommend(**ASKED, memory_limit="24GiB")
    assert (answer["config"]["method"], answer["provenance"]) == ("full", "measured")
    assert client.recommend(**ASKED, memory_limit=24 * 2**30) == answer
    lora = client.frontier(**ASKED, method="lora")
    assert {point["config"]["method"] for point in lora["points"]} == {"lora"}
    assert MODEL in [model["name"] for model in client.models()]
    assert [one["name"] for one in client.hardware()["measured"]] == ["h100-80g"]
    assert "smoke" in [space["name"] for space in client.spaces(global_batch=4)]


def test_sequences_with_lengths_are_asked_for_as_they_were_measured(
    client: Client, store: Store, tmp_path: Path
) -> None:
    data = tmp_path / "lengths.txt"
    data.write_text("\n".join(map(str, [*range(20, 420), 900])))
    options = WorkloadOptions.of(model=MODEL, seq_len=512, global_batch=4, lengths=data)
    store.add(make_trial({"method": "lora", "micro_batch": 1}, fits(3.0, 700.0), job=make_job(options)))
    arguments = {**ASKED, "seq_len": 512, "hardware": "h100-80g"}
    answer = client.recommend(**arguments, lengths=data)
    assert answer["workload"]["lengths"] == list(options.cut()[1] or ()) and answer["workload"]["seq_len"] == 512
    assert client.frontier(**arguments, lengths=data)["points"][0]["config"] == answer["config"]
    (stored,) = client.trials(model=MODEL, lengths=data, seq_len=512)
    assert stored["workload"] == answer["workload"] and list(client.trials(lengths=data)) == []
    with pytest.raises(NotMeasured):
        client.recommend(**arguments)
    search = client.search(**arguments, lengths=data, wait=False)
    queued = store.search(search.search_id)
    assert queued is not None and queued.workload == options.resolve()[1]
    estimate = client.estimate(**arguments, config="method=lora,micro_batch=1", lengths=[30] * 40 + [200], advice=False)
    assert estimate["tokens_per_second"] > 0
    with pytest.raises(UsageError, match="greater than or equal to 2"):
        client._connection.ask("POST", "/v1/estimates", body={"model": MODEL, "config": {}, "lengths": [0, 5]})


@pytest.mark.parametrize("limit", [1, 4, 5, 100])
def test_trials_are_followed_to_the_last_page(client: Client, limit: int) -> None:
    ids = [trial["trial_id"] for trial in client.trials(limit=limit)]
    assert ids == list(range(len(MADE), 0, -1))
    assert [trial["outcome"] for trial in client.trials(outcome="crashed", model=MODEL)] == ["crashed"]


def test_an_estimate_is_asked_for_in_text_or_values(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []
    monkeypatch.setattr(client._connection, "ask", lambda *a, **keywords: bodies.append(keywords["body"]) or {})
    client.estimate(MODEL, "method=lora, micro_batch=4,compile=true", hardware="t4", memory_limit=2**30)
    client.estimate(MODEL, {"method": "lora", "micro_batch": 4, "compile": True}, hardware="t4", memory_limit="1GiB")
    first, second = bodies
    assert first.pop("memory_limit") == "1073741824B" and second.pop("memory_limit") == "1GiB"
    assert first == second and first["config"] == {"method": "lora", "micro_batch": 4, "compile": True}
    with pytest.raises(UsageError, match="write axis=value"):
        client.estimate(MODEL, "lora")
    with pytest.raises(UsageError, match="nothing between two commas, after 'method=lora'"):
        client.estimate(MODEL, "method=lora,,compile=true")


def test_an_estimate_comes_from_the_server(client: Client) -> None:
    answer = client.estimate(**ASKED, config="method=lora,micro_batch=1", hardware="h100-80g", advice=False)
    assert (answer["provenance"], answer["config"]["method"], answer["fits"]) == ("predicted", "lora", True)


def test_a_search_is_started_followed_and_answered(client: Client, store: Store) -> None:
    seen: list[dict[str, Any]] = []

    def drive() -> None:
        while (lease := store.queue.claim("a:1:0")) is None:
            time.sleep(0.01)
        store.add(store.trials()[0], lease=lease)
        store.queue.end(lease, "succeeded", {"trials": 1})

    runner = threading.Thread(target=drive)
    runner.start()
    answer = client.search(**ASKED, memory_limit="24GiB", time_budget=90, report=seen.append)
    runner.join()
    assert answer == {"trials": 1}
    assert [(event["seq"], event["kind"]) for event in seen] == [
        (1, "queued"),
        (2, "running"),
        (3, "trial"),
        (4, "succeeded"),
    ]


def test_a_handle_joins_looks_and_cancels(client: Client) -> None:
    search = client.search(**ASKED, wait=False, key="mine")
    assert isinstance(search, RemoteSearch) and search.state()["state"] == "queued"
    assert search.state()["asked"]["time_budget_seconds"] == 600.0
    assert client.search(**ASKED, wait=False).search_id == search.search_id
    with pytest.raises(UsageError, match="key"):
        client.search(**ASKED, seed=1, wait=False, key="mine")
    with pytest.raises(TimeoutError, match="queued"):
        search.result(timeout=0.1)
    assert search.cancel()["state"] == "cancelled"
    with pytest.raises(Interrupted, match="cancelled"):
        search.result()
    assert [event["kind"] for event in search.events()] == ["queued", "cancelled"]
    assert [event["kind"] for event in search.events(after=1)] == ["cancelled"]
    assert list(search.events(after=2)) == []


@pytest.mark.parametrize(("ending", "kind"), [("nothing_fits", NothingFits), ("failed", AutofitError)])
def test_how_a_search_failed_is_raised(client: Client, store: Store, ending: str, kind: type[AutofitError]) -> None:
    search = client.search(**ASKED, wait=False)
    store.queue.end(claimed(store), ending, {"reason": "too large"})
    with pytest.raises(kind, match="too large") as raised:
        search.result()
    assert type(raised.value) is kind


def test_what_came_closest_is_told_as_where_the_library_is_called(client: Client, store: Store) -> None:
    with pytest.raises(NothingFits) as here:
        recommend(WorkloadOptions(**ASKED), hardware="h100-80g", memory_limit_bytes=2**30, store=store)
    with pytest.raises(NothingFits) as asked:
        client.recommend(**ASKED, memory_limit=2**30)
    assert isinstance(here.value, Shortfall) and here.value.closest is not None
    search = client.search(**ASKED, wait=False)
    store.queue.end(claimed(store), "nothing_fits", here.value.to_json())
    with pytest.raises(NothingFits) as searched:
        search.result()
    for raised in (asked.value, searched.value):
        assert isinstance(raised, Shortfall) and raised.facts() == here.value.facts()


def test_events_go_on_after_the_server_was_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.05)
    with serving(store) as port:
        search = Client(f"http://127.0.0.1:{port}", TOKEN).search(**ASKED, wait=False)
        lease = claimed(store)
        store.add(store.trials()[0], lease=lease)
        stream = search.events()
        seen = [next(stream) for _ in range(3)]
    store.add(store.trials()[1], lease=lease)
    again = threading.Event()

    def restart() -> None:
        with serving(store, port):
            again.wait()

    server = threading.Timer(0.3, restart)
    server.start()
    seen.append(next(stream))
    store.queue.end(lease, "succeeded", {})
    seen += stream
    again.set()
    server.join()
    assert [event["seq"] for event in seen] == [1, 2, 3, 4, 5]
    assert [event["kind"] for event in seen] == ["queued", "running", "trial", "trial", "succeeded"]


def test_who_follows_gives_up_in_the_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(following, "PATIENCE_SECONDS", 0.1)
    with serving(store) as port:
        search = Client(f"http://127.0.0.1:{port}", TOKEN).search(**ASKED, wait=False)
    with pytest.raises(Unreachable):
        next(search.events())


def test_errors_are_the_same_as_here(client: Client, store: Store) -> None:
    with pytest.raises(NothingFits, match=r"nothing that was measured fits 1\.00 GiB"):
        client.recommend(**ASKED, memory_limit="1GiB")
    with pytest.raises(NotMeasured, match="has not been measured on h100-80g") as lacking:
        client.recommend(MODEL)
    assert lacking.value.remedy.startswith("run: autofit search --model smollm2-135m")
    with pytest.raises(UsageError, match="did you mean smollm2-135m"):
        client.frontier("smolm2-135m")
    with pytest.raises(UsageError, match="did you mean 24GiB"):
        client.recommend(**ASKED, memory_limit="24")
    with pytest.raises(UsageError, match="there is no search"):
        RemoteSearch(client._connection, "none").state()


def test_who_may_not_ask_is_told_what_to_do(client: Client, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentLacks, match="set AUTOFIT_TOKEN"):
        Client(token="wrong").models()
    reader = Client(token=store.access.create("ann", "read"))
    assert reader.models() and Client(token=f"{TOKEN}\n").models()
    with pytest.raises(EnvironmentLacks, match="wider scope"):
        reader.search(**ASKED)
    monkeypatch.delenv("AUTOFIT_TOKEN")
    with pytest.raises(EnvironmentLacks, match="bearer token"):
        Client().models()


@pytest.mark.parametrize(
    ("status", "title", "error"),
    [
        (503, "Store unavailable", StoreError("the store (SQLite) is locked", remedy="close the other program")),
        (503, "Overloaded", Overloaded("it takes longer than 300 s", remedy="ask again: it goes on")),
        (404, "Not measured", NotMeasured("nothing on t4 (of 3)", remedy="run: autofit search")),
    ],
)
def test_a_remedy_comes_through(status: int, title: str, error: EnvironmentLacks) -> None:
    received = problem(status, title, str(error))
    assert isinstance(received, EnvironmentLacks) and str(received) == str(error)
    assert (received.message, received.remedy) == (error.message, error.remedy)
    assert type(received) in type(error).__mro__


def test_a_server_that_cannot_be_reached_is_said() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    with pytest.raises(EnvironmentLacks, match=r"cannot be reached: .*refused.*start autofit serve"):
        Client(f"http://127.0.0.1:{port}").models()


def test_no_proxy_stands_before_this_machine(client: Client, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:{1}".format(*listening.getsockname()))
    assert Client().models()
    with pytest.raises(Unreachable, match="refused"):  # by the proxy
        Client("http://example.invalid").models()


@pytest.mark.parametrize("secret", ["ключ", "a\nb", "a\0b"])
def test_what_no_header_can_hold_is_said(client: Client, secret: str) -> None:
    with pytest.raises(UsageError, match="Idempotency-Key"):
        client.search(**ASKED, key=secret)
    with pytest.raises(UsageError, match="token") as refused:
        Client(token=secret)
    assert secret not in str(refused.value)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:8000", "localhost"])
def test_only_http_is_spoken(url: str) -> None:
    with pytest.raises(UsageError, match="is not understood"):
        Client(url)


def test_another_server_is_not_taken_for_autofit() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = b"<html>"
            self.send_response(200 if self.path == "/v1/models" else 502)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        client = Client(f"http://127.0.0.1:{other.server_port}")
        with pytest.raises(Unreachable, match="does not answer in JSON"):
            client.models()
        with pytest.raises(Unreachable, match="answers with status 502"):
            client.hardware()
        other.shutdown()
        thread.join()


def test_an_event_that_has_broken_off_is_left_out() -> None:
    lines = [b": ping\n", b"\n", b"id: 1\r\n", b'data: {"seq":\r\n', b"data: 1}\r\n", b"\r\n", b'data: {"seq": 2}\n']
    assert list(read_events(lines)) == [json.loads('{"seq": 1}')]
