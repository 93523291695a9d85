"""What the server refuses: problem documents after RFC 9457, and who may ask at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from unit.operations.made_trials import MODEL, OPTIONS, fill

from autofit.api.app import create_app
from autofit.store import Store

WORKLOAD = f"model={MODEL}&seq_len=128&global_batch=4"
TOKEN = "correct-horse-battery-staple"

PROBLEMS = {
    "/v1/recommendation?model=smolm2-135m": (400, "did you mean smollm2-135m"),
    "/v1/recommendation?model=/etc/passwd": (400, "unknown model '/etc/passwd'"),
    "/v1/recommendation": (400, "model"),
    f"/v1/recommendation?{WORKLOAD}&memory_limit=24": (400, "has no unit: did you mean 24GiB?"),
    f"/v1/recommendation?{WORKLOAD}&memory_limit=24Gigs": (400, "memory size '24Gigs' is not understood"),
    f"/v1/recommendation?{WORKLOAD}&memory_limit=": (400, "memory size"),
    f"/v1/recommendation?{WORKLOAD}&method=lara": (400, "did you mean lora"),
    f"/v1/recommendation?{WORKLOAD}&allow=numeric": (400, "did you mean numerics"),
    f"/v1/recommendation?{WORKLOAD}&min_rank=0": (400, "min_rank"),
    f"/v1/recommendation?{WORKLOAD}&hardware=h10-80g": (400, "did you mean h100-80g"),
    f"/v1/recommendation?{WORKLOAD}&lora_dropout=1": (400, "lora_dropout"),
    f"/v1/recommendation?{WORKLOAD}&lora_dropout=nan": (400, "lora_dropout"),
    f"/v1/recommendation?model={MODEL}&seq_len=1": (400, "seq_len"),
    f"/v1/recommendation?model={MODEL}&seq_len=many": (400, "seq_len"),
    f"/v1/recommendation?model={MODEL}&seq_len=9000": (400, "longer than the 8192 positions"),
    f"/v1/recommendation?model={MODEL}&global_batch=5&devices=2": (400, "not a multiple of 2 devices"),
    f"/v1/recommendation?{WORKLOAD}&memory_limit=1GiB": (404, "the closest takes 2.00 GiB"),
    f"/v1/recommendation?model={MODEL}&seq_len=256&provenance=measured": (
        404,
        "autofit search --model smollm2-135m --seq-len 256",
    ),
    f"/v1/frontier?model={MODEL}&seq_len=256": (404, "measured: seq-len 128 global-batch 4"),
    "/v1/frontier?model=llama-3.1-8b": (404, "autofit search --model llama-3.1-8b"),
    "/v1/trials?limit=0": (400, "limit"),
    "/v1/trials?limit=1001": (400, "limit"),
    "/v1/trials?before=0": (400, "before"),
    "/v1/trials?before=99999999999999999999": (400, "before"),
    "/v1/trials?offset=1": (400, "offset"),
    "/v1/trials?outcome=fit": (400, "did you mean fits"),
    "/v1/trials?hardware=h10-80g": (400, "did you mean h100-80g"),
    "/v1/trials?seq_len=1": (400, "seq_len"),
    "/v1/trials?seed=99999999999999999999": (400, "seed"),
    f"/v1/recommendation?{WORKLOAD}&memory_limt=100MiB": (
        400,
        "unknown parameter 'memory_limt': did you mean memory_li",
    ),
    "/v1/recommendation?modle=smollm2-135m": (400, "did you mean model"),
    f"/v1/frontier?{WORKLOAD}&memory_limit=100": (400, "did you mean 100GiB"),
    f"/v1/frontier?{WORKLOAD}&max_trials=3": (400, "unknown parameter 'max_trials'"),
    "/v1/trials?min_rank=8": (400, "unknown parameter 'min_rank'"),
    "/v1/nothing": (404, "Not Found"),
}
"""Request, to the status and a part of the detail."""


@pytest.fixture
def guarded(store: Store) -> Iterator[TestClient]:
    """A client, without a token, of a server that wants one."""
    with TestClient(create_app(store, token=TOKEN)) as opened:
        yield opened


@pytest.mark.parametrize("request_", PROBLEMS)
def test_a_problem(client: TestClient, request_: str) -> None:
    status, part = PROBLEMS[request_]
    answer = client.get(request_, follow_redirects=False)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    body = answer.json()
    assert set(body) - {"memory_limit_bytes", "closest"} == {"type", "title", "status", "detail"}
    assert body["status"] == status
    assert body["title"]
    assert part in body["detail"]
    assert "\n" not in body["detail"]


@pytest.mark.parametrize(
    ("kind", "detail"),
    [
        ("text/plain", "the body must be JSON: send Content-Type: application/json"),
        ("application/json", "the body: Input should be a valid dictionary"),
    ],
)
def test_a_body_that_is_no_object_says_what_to_send(client: TestClient, kind: str, detail: str) -> None:
    answer = client.post("/v1/estimates", content="[]", headers={"content-type": kind})
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(detail)


def test_another_verb_is_refused_and_says_which_is_right(guarded: TestClient) -> None:
    answer = guarded.post("/v1/trials", headers={"Authorization": f"Bearer {TOKEN}"})
    assert (answer.status_code, answer.headers["content-type"]) == (405, "application/problem+json")
    assert answer.headers.get("allow") == "GET"  # RFC 9110, section 15.5.6: it must be there
    answer = guarded.put("/v1/searches/none", headers={"Authorization": f"Bearer {TOKEN}"})
    assert set(answer.headers["allow"].split(", ")) == {"GET", "DELETE"}


@pytest.mark.parametrize("path", ["/v1/trials", "/", "/healthz", "/metrics"])
def test_head_is_refused_as_a_problem(client: TestClient, path: str) -> None:
    head = client.head(path)
    assert (head.status_code, head.headers["allow"]) == (405, "GET")
    assert head.headers["content-type"] == "application/problem+json"


def test_what_nobody_foresaw_is_a_problem_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(Store, "trials", fail)
    answer = TestClient(create_app(store), raise_server_exceptions=False).get("/v1/trials")
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert "secret detail" not in answer.text


def test_a_store_that_fails_is_503(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Store.open(str(path)) as store:
        fill(store)
        for file in tmp_path.glob("store.db*"):
            file.write_bytes(b"no database" * 1000)
        with TestClient(create_app(store)) as client:
            answer = client.get("/v1/trials")
            assert client.get("/healthz").status_code == 200
    assert (answer.status_code, answer.json()["title"]) == (503, "Store unavailable")
    assert str(path) in answer.json()["detail"]


def test_the_advice_of_a_404_asks_for_the_very_workload(client: TestClient) -> None:
    """The search that is advised must lead to the answer that was asked for, whatever the workload options were."""
    path = f"/v1/recommendation?{WORKLOAD}&seed=7&lora_dropout=0.25&devices=2&provenance=measured"
    detail = client.get(path).json()["detail"]
    advice = detail.partition("autofit search")[2]
    assert "--seed 7" in advice
    assert "--lora-dropout 0.25" in advice
    assert "--devices 2" in advice


def test_problems_name_parameters_as_they_are_called_here(client: TestClient) -> None:
    question = f"/v1/recommendation?{WORKLOAD}&provenance=measured"
    for wrong, detail in (
        ("memory_limit=24Gigs", "memory_limit: memory size '24Gigs' is not understood"),
        ("memory_limit=81GiB", "memory-limit 81.00 GiB is more than the 80.00 GiB of h100-80g"),
        ("method=lora&min_rank=256", "is within method lora min_rank 256 allow numerics (run: autofit search --model "),
        ("memory_limit=1GiB", "what would help: a higher memory_limit (h100-80g has 80.00 GiB), space offload, "),
    ):
        assert detail in client.get(f"{question}&{wrong}").json()["detail"]


def test_what_is_measured_is_said_for_a_model_in_other_letters(client: TestClient) -> None:
    detail = client.get(f"/v1/frontier?model={MODEL.upper()}&seq_len=256").json()["detail"]
    assert f"measured: seq-len {OPTIONS.seq_len} global-batch {OPTIONS.global_batch}" in detail


def test_nothing_fits_speaks_of_the_method_that_was_asked(client: TestClient) -> None:
    detail = client.get(f"/v1/recommendation?{WORKLOAD}&method=full&memory_limit=9GiB").json()["detail"]
    assert "10.00 GiB" in detail  # the lightest full fine-tuning; LoRA at 3 GiB was not asked for, and would fit


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        TOKEN,
        "Bearer",
        "Bearer wrong",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        "Bearer kléo",
    ],
)
@pytest.mark.parametrize("path", ["/v1/trials", f"/v1/recommendation?{WORKLOAD}", "/openapi.json", "/docs", "/nothing"])
def test_without_the_token_nothing_is_told(guarded: TestClient, path: str, header: str | None) -> None:
    headers = {} if header is None else {b"authorization": header.encode()}
    answer = guarded.get(path, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (401, "application/problem+json")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert set(answer.json()) == {"type", "title", "status", "detail"}


def test_with_the_token(guarded: TestClient) -> None:
    assert guarded.get("/v1/trials", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    # RFC 9110, section 11.1: the scheme's name is the same in any case.
    assert guarded.get("/v1/trials", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.8.9.10", "[::1]:8000", "[::1]"])
def test_on_loopback_this_machines_names_are_answered(store: Store, host: str) -> None:
    with TestClient(create_app(store, loopback=True)) as client:
        assert client.get("/v1/trials", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["rebound.example.org", "rebound.example.org:8000", "", "10.0.0.1:8000", "localhost.example.org", "[::1]x", "::1]"],
)
def test_on_loopback_other_names_are_refused(store: Store, host: str) -> None:
    """A page whose own name is made to mean 127.0.0.1 must not have a browser read the store for it."""
    with TestClient(create_app(store, loopback=True)) as client:
        answer = client.get("/v1/trials", headers={"Host": host})
    assert (answer.status_code, answer.headers["content-type"]) == (421, "application/problem+json")


def test_who_bears_the_token_may_name_the_server_as_they_like(store: Store) -> None:
    with TestClient(create_app(store, token=TOKEN, loopback=True)) as client:
        headers = {"Host": "proxy.example.org", "Authorization": f"Bearer {TOKEN}"}
        assert client.get("/v1/trials", headers=headers).status_code == 200


def test_what_came_closest_is_told_over_http_too(client: TestClient) -> None:
    problem = client.get(f"/v1/recommendation?{WORKLOAD}&memory_limit=1GiB").json()
    assert problem["memory_limit_bytes"] == 1024**3
    assert problem["closest"]["over_limit_bytes"] == 1024**3
