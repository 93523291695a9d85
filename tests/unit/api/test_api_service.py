"""What the server tells of itself and of the catalog, conditional requests, exports, and what is predicted."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import TypeAdapter
from unit.operations.made_trials import MODEL, fits, make_trial

from autofit import export, operations
from autofit.api.app import create_app
from autofit.api.routes import answers, remembered
from autofit.api.routes.answers import NOTES_HEADER
from autofit.api.schema import documents
from autofit.core.errors import NotMeasured, UsageError
from autofit.core.units import KIB
from autofit.operations import SearchRequest, WorkloadOptions
from autofit.operations.service import prediction_process
from autofit.operations.service.prediction_process import Overloaded, PredictionProcess
from autofit.prediction.estimation import estimated
from autofit.store import Store

WORKLOAD = {"model": MODEL, "seq_len": 128, "global_batch": 4}
ESTIMATE = {"model": MODEL, "hardware": "rtx-4090", "seq_len": 128, "global_batch": 4, "advice": False}
CONDITIONAL = ("/v1/recommendation", "/v1/frontier", "/v1/trials")


def asked_for(path: str) -> dict[str, Any]:
    return {} if path == "/v1/trials" else WORKLOAD


@pytest.mark.parametrize("path", CONDITIONAL)
def test_who_has_the_newest_answer_is_told_so(client: TestClient, store: Store, path: str) -> None:
    first = client.get(path, params=asked_for(path))
    tag = first.headers["etag"]
    for tags in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = client.get(path, params=asked_for(path), headers={"If-None-Match": tags})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert client.get(path, params=asked_for(path), headers={"If-None-Match": '"other"'}).status_code == 200
    store.add(make_trial({"micro_batch": 2}, fits(1, 900)))
    later = client.get(path, params=asked_for(path), headers={"If-None-Match": tag})
    assert (later.status_code, later.headers["etag"] != tag) == (200, True)


def test_an_answer_is_made_once_until_a_trial_comes(
    client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def recommend(*arguments: object, **more: object) -> object:
        made.append(None)
        return operations.recommend(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(answers, "recommend", recommend)
    exported = [client.get("/v1/recommendation", params={**WORKLOAD, "format": name}) for name in ("json", "trl") * 2]
    assert len(made) == 2, "one for each format"
    assert [a.text for a in exported[:2]] == [a.text for a in exported[2:]]
    assert exported[1].headers[NOTES_HEADER] == exported[3].headers[NOTES_HEADER]
    assert exported[0].headers["x-request-id"] != exported[2].headers["x-request-id"]
    store.add(make_trial({"micro_batch": 2}, fits(1, 900)))
    assert client.get("/v1/recommendation", params=WORKLOAD).json() != exported[0].json() and len(made) == 3


def test_of_many_answers_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST_BYTES", 2 * (KIB + 10))
    kept, content = remembered.Answers(), remembered.Content(b"0123456789", "text/plain")
    for tag in ("a", "b", "c"):
        kept.keep(tag, content)
        kept.get("a")
    assert [kept.get(tag) for tag in ("a", "b", "c")] == [content, None, content]


def test_any_tag_stands_only_for_an_answer_that_there_is(client: TestClient) -> None:
    def asked(**more: str) -> int:
        return client.get("/v1/recommendation", params={**WORKLOAD, **more}, headers={"If-None-Match": "*"}).status_code

    assert (asked(), asked(memory_limit="1MiB")) == (304, 404)


def test_other_questions_have_other_tags(client: TestClient) -> None:
    tags = [
        client.get("/v1/recommendation", params={**WORKLOAD, **more}).headers["etag"]
        for more in ({}, {"memory_limit": "30GiB"}, {"format": "trl"}, {"method": "lora"})
    ]
    assert len(set(tags)) == 4


@pytest.mark.parametrize("name", [name for name in export.FORMATS if name != "json"])
def test_every_export(client: TestClient, name: str) -> None:
    method = {"method": "lora"} if name == "deepspeed" else {}
    answer = client.get("/v1/recommendation", params={**WORKLOAD, **method, "format": name})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert "autofit" in answer.text or name == "deepspeed"


def test_what_an_export_cannot_express_is_told(client: TestClient) -> None:
    answer = client.get("/v1/recommendation", params={**WORKLOAD, "format": "trl"})
    assert "trl always chunks the loss" in answer.headers[NOTES_HEADER]
    wrong = client.get("/v1/recommendation", params={**WORKLOAD, "format": "tlr"})
    assert (wrong.status_code, "did you mean trl" in wrong.json()["detail"]) == (400, True)


DOCUMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/recommendation": (documents.RecommendationAnswer, WORKLOAD),
    "/v1/frontier": (documents.FrontierAnswer, WORKLOAD),
    "/v1/trials": (documents.TrialsAnswer, {}),
    "/v1/models": (list[documents.ModelAnswer], {}),
    "/v1/hardware": (documents.HardwareAnswer, {}),
    "/v1/spaces": (list[documents.SpaceAnswer], {"global_batch": 4}),
    "/healthz": (documents.HealthAnswer, {}),
    "/readyz": (documents.ReadyAnswer, {}),
}


@pytest.mark.parametrize("path", DOCUMENTS)
def test_answers_are_as_described(client: TestClient, path: str) -> None:
    kind, query = DOCUMENTS[path]
    answer = client.get(path, params=query)
    assert answer.status_code == 200
    TypeAdapter(kind).validate_python(answer.json())


def test_the_catalog(client: TestClient, store: Store) -> None:
    from autofit.catalog.models import names

    assert [model["name"] for model in client.get("/v1/models").json()] == list(names())
    hardware = client.get("/v1/hardware").json()
    assert {"h100-80g", "rtx-4090"} <= {card["name"] for card in hardware["cards"]}
    assert [one["name"] for one in hardware["measured"]] == ["h100-80g"]
    few, many = (client.get("/v1/spaces", params={"global_batch": batch}).json() for batch in (1, 64))
    assert [s["name"] for s in few] == [s["name"] for s in many]
    assert sum(s["configs"] for s in few) < sum(s["configs"] for s in many)


def test_ready_means_that_the_store_answers_and_the_runner_lives(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        alive = True

        def is_alive(self) -> bool:
            return self.alive

    runner = Runner()
    client = TestClient(create_app(store, runner=runner))
    assert client.get("/readyz").json() == {"status": "ok", "store": "ok", "runner": "ok"}
    runner.alive = False
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["store"]) == (503, "ok")
    assert answer.headers["content-type"] == "application/problem+json"
    assert "not looked" in answer.json()["runner"] and answer.json()["runner"] in answer.json()["detail"]
    runner.alive = True
    store.close()
    monkeypatch.setattr(store, "version", fails)
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["runner"]) == (503, "ok")
    assert answer.json()["store"] == "it does not answer", "no address, for whoever asks has no token"


def test_the_server_says_that_it_runs_though_all_requests_wait_for_the_store(
    client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, there = threading.Semaphore(0), threading.Event()

    def waits() -> list[Any]:
        waiting.release()
        there.wait()
        return []

    monkeypatch.setattr(store, "hardware", waits)
    with ThreadPoolExecutor(40) as threads:  # as many as anyio has
        asked = [threads.submit(client.get, "/v1/hardware") for _ in range(40)]
        try:
            for _ in asked:
                waiting.acquire()
            assert client.get("/healthz").status_code == 200
        finally:
            there.set()


def fails(*args: object, **options: object) -> None:
    from autofit.core.errors import StoreError

    raise StoreError("the store at /secret/place is gone", remedy="mend it")


def series(text: str) -> dict[str, float]:
    """The values of Prometheus' text format by series."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics(client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        client.get("/v1/frontier", params=WORKLOAD)
    client.get("/v1/frontier")
    client.get("/made/up")
    answer = client.get("/metrics")
    assert re.match(r"text/plain; version=[\d.]+; charset=utf-8", answer.headers["content-type"])
    figures = series(answer.text)
    assert figures['autofit_requests_total{method="GET",route="/v1/frontier",status="200"}'] == 2
    assert figures['autofit_requests_total{method="GET",route="/v1/frontier",status="400"}'] == 1
    assert figures['autofit_requests_total{method="any",route="none",status="404"}'] == 1
    assert figures['autofit_request_seconds_count{method="GET",route="/v1/frontier"}'] == 3
    assert (figures['autofit_trials{outcome="fits"}'], figures["autofit_store_up"]) == (8, 1)
    assert figures["autofit_queue_seconds"] == 0
    monkeypatch.setattr(store, "version", fails)
    lost = series(client.get("/metrics").text)
    assert lost["autofit_store_up"] == 0
    assert not any(name.startswith("autofit_trials") for name in lost)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)  # it traces a model, which takes seconds
def test_an_estimate_is_made_in_a_process_of_its_own(client: TestClient) -> None:
    answer = client.post("/v1/estimates", json={**ESTIMATE, "config": {"method": "lora", "micro_batch": 2}})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    TypeAdapter(documents.EstimateAnswer).validate_python(body)
    assert sum(body["breakdown"].values()) == body["device_bytes"]
    assert body["config"]["precision"] == "bf16-mixed"
    on_t4 = client.post("/v1/estimates", json={**ESTIMATE, "hardware": "t4", "config": {"method": "lora"}}).json()
    assert on_t4["config"]["precision"] == "fp16-mixed", "the card emulates bf16"


WRONG = [
    ({"config": {"methd": "lora"}}, "unknown axis 'methd'"),
    ({"config": {"method": "lara"}}, "did you mean lora"),
    ({"hardware": "rtx-409"}, "did you mean rtx-4090"),
    ({"model": "/etc/passwd"}, "unknown model"),
    ({"memory_limit": "24"}, "did you mean 24GiB"),
    ({"seq_len": 9000}, "longer than the 8192 positions"),
    ({"config": {"a": [1]}}, "config"),
    ({"advise": True}, "advise"),
    ({"advice": 0}, "advice: Input should be a valid boolean"),
]


@pytest.mark.parametrize(("options", "part"), WRONG)
def test_a_wrong_estimate_is_refused(client: TestClient, options: dict[str, Any], part: str) -> None:
    answer = client.post("/v1/estimates", json={**ESTIMATE, **options})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert part in answer.json()["detail"]


def test_what_is_not_measured_is_predicted_and_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(store)
    requests: list[SearchRequest] = []

    def call(function: Any, request: SearchRequest) -> dict[str, Any]:
        assert (function.__name__, request.store) == ("predicted_recommendation", store.url)
        requests.append(request)
        return {"provenance": "predicted"}

    monkeypatch.setattr(app.state.predicting, "call", call)
    client = TestClient(app)
    for more in ({"hardware": "rtx-4090"}, {"seq_len": 256}, {"provenance": "predicted"}):
        answer = client.get("/v1/recommendation", params={**WORKLOAD, **more})
        assert (answer.status_code, answer.json()["provenance"]) == (200, "predicted")
        assert "etag" not in answer.headers
    too_much = client.get("/v1/recommendation", params={**WORKLOAD, "hardware": "rtx-4090", "memory_limit": "99GiB"})
    assert (too_much.status_code, "more than the" in too_much.json()["detail"]) == (400, True)
    assert [one.hardware for one in requests] == ["rtx-4090", "h100-80g", "h100-80g"]
    for more in ({"provenance": "measured"}, {"format": "trl"}):
        refused = client.get("/v1/recommendation", params={**WORKLOAD, "hardware": "rtx-4090", **more})
        assert refused.status_code == 404, "an export states what was measured"
        assert "nothing has been measured on rtx-4090" in refused.json()["detail"]
        assert "run autofit search --model" in refused.json()["detail"]
    both = client.get("/v1/recommendation", params={**WORKLOAD, "provenance": "predicted", "format": "trl"})
    assert (both.status_code, "leave provenance=predicted out" in both.json()["detail"]) == (400, True)
    assert client.get("/v1/recommendation", params=WORKLOAD).json()["provenance"] == "measured"


def test_what_no_catalog_has_is_not_predicted(store: Store) -> None:
    """A processor's speed is known to itself alone."""
    trial = store.trials()[0]
    store.add(replace(trial, hardware=replace(trial.hardware, name="cpu-of-another", kind="cpu", device_name="x")))
    client = TestClient(create_app(store))
    query = {**WORKLOAD, "seq_len": 256, "hardware": "cpu-of-another"}
    assert client.get("/v1/recommendation", params=query).json()["title"] == "Not measured"
    refused = client.get("/v1/recommendation", params={**query, "provenance": "predicted"})
    assert (refused.status_code, "a card of the catalog" in refused.json()["detail"]) == (400, True)


def large() -> int:
    return len(bytearray(2**40))


def ends() -> None:
    import os

    os._exit(9)


def slow() -> None:

    time.sleep(60)


def large_after_a_while() -> None:

    time.sleep(0.3)
    raise MemoryError


def number_of_process(which: int = 0) -> int:
    """Calls with another argument are other calls."""
    import os

    return os.getpid()


def raises() -> None:
    raise NotMeasured("nothing", remedy="a search")


def test_what_goes_wrong_in_the_process_is_told_and_the_next_call_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_process, "CALLS", 1)
    process, options = PredictionProcess(), WorkloadOptions(model=MODEL)
    try:
        with pytest.raises(NotMeasured, match=r"nothing \(a search\)"):
            process.call(raises)
        for fatal in (large, ends):
            with pytest.raises(Overloaded, match=r"more than the [\d.]+ GiB"):
                process.call(fatal)
        with pytest.raises(Overloaded, match="takes longer than 0 s"):
            process.call(slow, seconds=0.1)
        process.close()
        with pytest.raises(UsageError, match="did you mean lora"):
            process.call(estimated, options, {"method": "lara"}, hardware="t4", advice=False, store="none.db")
    finally:
        process.close()


def at_once(process: PredictionProcess, functions: list[Callable[[], Any]]) -> list[Any]:
    """What calls of these functions return or raise that wait for each other."""

    def called(function: Callable[[], Any]) -> Any:
        try:
            return process.call(function, seconds=30)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(functions)) as threads:
        return list(threads.map(called, functions))


def test_calls_that_wait_are_answered_when_another_process_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_process, "TASKS", 3)
    process = PredictionProcess()
    try:
        numbers = at_once(process, [partial(number_of_process, which) for which in range(4)])
        numbers += [process.call(number_of_process, seconds=30) for _ in range(4)]
    finally:
        process.close()
    assert all(isinstance(number, int) for number in numbers), numbers
    assert len(set(numbers)) == 3


def test_to_warm_it_again_wears_no_process_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_process, "TASKS", 2)
    process = PredictionProcess()
    try:
        number = process.call(number_of_process)
        for _ in range(3):
            process.warm()
        for thread in threading.enumerate():
            if thread.name == "autofit-warm":
                thread.join()
        assert process.call(number_of_process) == number
    finally:
        process.close()


def test_a_call_that_takes_too_much_memory_costs_no_other_its_answer() -> None:
    process = PredictionProcess()
    try:
        calls = [partial(number_of_process, which) for which in range(4)]
        blamed, *others = at_once(process, [large_after_a_while, *calls])
    finally:
        process.close()
    assert isinstance(blamed, Overloaded)
    assert all(isinstance(number, int) for number in others), others


def test_a_process_that_ended_meanwhile_is_no_fault_of_the_next_call() -> None:
    process = PredictionProcess()
    try:
        ended = process.call(number_of_process)
        os.kill(ended, signal.SIGKILL)
        assert process.call(number_of_process) != ended
    finally:
        process.close()


def test_too_many_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_process, "CALLS", 0)
    process = PredictionProcess()
    with pytest.raises(Overloaded, match="too many"):
        process.call(raises)
    process.close()
