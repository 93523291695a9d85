"""Any request that the API's description allows, and many that it forbids, from whoever may ask: no answer is a failure
of the server, and each is as described. Schemathesis draws the requests, the same ones every time."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import uvicorn
from hypothesis import HealthCheck, given, settings
from schemathesis import APIOperation, Case, Config, GenerationMode, openapi
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from unit.operations.made_trials import MODEL, fill

from autofit.api.app import create_app
from autofit.operations.service.submission import submit
from autofit.planning.requests import SearchRequest, WorkloadOptions
from autofit.prediction.estimation import config_on
from autofit.store import SCOPES, Store

EXAMPLES = int(os.environ.get("AUTOFIT_EXAMPLES", "2"))
"""Requests of each kind that are drawn for each route."""
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
CONFIG = Config.from_dict({"generation": {"with-security-parameters": False}})
SECONDS = 120
"""Time for an answer on a busy machine, and bound of a stream of events."""
CALLERS = ("anyone", "nobody", *SCOPES)
"""Without a token where anyone may read, without one where nobody may, and with a token of each scope."""
OPEN = ("GET /healthz", "GET /readyz")
NEEDS = {"POST /v1/searches": "run", "DELETE /v1/searches/{search_id}": "run", "GET /v1/audit": "admin"}
"""The scope that a route needs, if it does more than read."""
EVENTS = "/v1/searches/{search_id}/events"
LIKELY: dict[str, list[Any]] = {
    "model": [MODEL],
    "seq_len": [128],
    "global_batch": [4],
    "lora_dropout": [0.0],
    "devices": [1, 2],
    "seed": [0, 1],
    "hardware": ["h100-80g", "auto"],
    "method": ["any", "lora", "qlora"],
    "min_rank": [8, 64],
    "allow": ["exact", "training"],
    "memory_limit": ["24GiB", "9 GB"],
    "time_budget": ["1h30m"],
    "space": ["smoke", None],
    "outcome": ["fits", "out_of_memory"],
    "format": ["json", "trl", "axolotl"],
    "config": [{"method": "lora", "micro_batch": 2}, {}],
}
"""Values that mean something together: others rarely come further than the first check."""
KINDS = ("likely", "allowed", "forbidden")
"""Of requests: with likely values alone, with any that the description allows, and with some that it forbids."""


class Server:
    """The real application, which estimates nothing and has no runner, over a store with trials and two searches."""

    def __init__(self, store: Store, *, closed: bool) -> None:
        workloads = (WorkloadOptions(model=MODEL, seed=seed) for seed in (2, 3))
        ends, waits = (SearchRequest(workload=workload, hardware="h100-80g") for workload in workloads)
        self.ended, lease = submit(ends, store), store.queue.claim("a:1:0")
        assert lease is not None
        store.queue.end(lease, "succeeded", {"trials": 0})
        self.waits = submit(waits, store)
        app = create_app(store, closed=closed, loopback=True)
        self.document = app.openapi()
        for process in (app.state.estimating, app.state.predicting):
            process.call = self._estimate
        self._serving = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._serving.run)
        self._thread.start()
        while not self._serving.started:
            time.sleep(0.05)
        self.address = f"http://127.0.0.1:{self._serving.servers[0].sockets[0].getsockname()[1]}"

    def end(self) -> None:
        self._serving.should_exit = True
        self._thread.join()

    def _estimate(self, function: Any, request: Any, *config: Any, **options: Any) -> Any:
        """In place of the estimating process: what it reads of a request, and the description's own example."""
        (request if config else request.workload).resolve()
        if config:
            config_on(options["hardware"], *config, request.model)
        answer = "EstimateAnswer" if config else "RecommendationAnswer"
        return self.document["components"]["schemas"][answer]["examples"][0]

    def operations(self, kind: str) -> Iterator[APIOperation]:
        """What can be asked. The events of a search that waits would never end: they are never drawn."""
        document = copy.deepcopy(self.document)
        for path, operations in document["paths"].items():
            ids = [self.ended] if path == EVENTS else [self.waits, self.ended]
            for parameter in (p for operation in operations.values() for p in operation.get("parameters", ())):
                likely(kind, parameter, "schema", {**LIKELY, "search_id": ids}.get(parameter["name"]))
        for schema in ("AskedSearch", "AskedEstimate"):
            fields = document["components"]["schemas"][schema]["properties"]
            for name in fields:
                likely(kind, fields, name, LIKELY.get(name))
        for result in openapi.from_dict(document, config=CONFIG).get_all_operations():
            operation = result.ok()
            if kind != "forbidden" or {"parameters", "requestBody"} & operation.definition.raw.keys():
                yield operation


def likely(kind: str, holder: dict[str, Any], key: str, values: list[Any] | None) -> None:
    """Have a schema allow the likely values only, or have it say that they are allowed."""
    if values is not None and kind == "likely":
        holder[key] = {"enum": values}
    elif values is not None and kind == "allowed":
        holder[key] = {"anyOf": [{"enum": values}, holder[key]]}


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """A store with ten trials, of each kind in turn."""
    with Store.open(url) as opened:
        fill(opened)
        yield opened


@pytest.fixture
def server(store: Store, caller: str) -> Iterator[Server]:
    """A server that only those with a token may ask, unless the caller is anyone."""
    running = Server(store, closed=caller != "anyone")
    yield running
    running.end()


def refusal(caller: str, route: str) -> int | None:
    """The status by which the caller is refused; None if it may ask."""
    needs = NEEDS.get(route, "read")
    if caller in SCOPES:
        return 403 if list(SCOPES).index(caller) < list(SCOPES).index(needs) else None
    return None if route in OPEN or (caller == "anyone" and needs == "read") else 401


@pytest.mark.parametrize("caller", CALLERS)
def test_every_answer_is_as_described(server: Server, store: Store, caller: str) -> None:
    session, statuses = requests.Session(), set()
    if caller in SCOPES:
        session.headers["Authorization"] = f"Bearer {store.access.create('name', caller)}"

    def check(case: Case) -> None:
        answer = case.call(server.address, session=session, timeout=SECONDS)
        case.validate_response(answer, checks=CHECKS)
        statuses.add(answer.status_code)
        expected = refusal(caller, case.operation.label)
        if expected is None:
            assert answer.status_code != 401, case.as_curl_command()
        elif answer.status_code != 405:
            assert answer.status_code == expected, case.as_curl_command()

    for kind in KINDS:
        for operation in server.operations(kind):
            drawn(check, operation, GenerationMode.NEGATIVE if kind == "forbidden" else GenerationMode.POSITIVE)
    assert statuses >= ({200, 401} if caller == "nobody" else {200, 400, 404})


def drawn(check: Callable[[Case], None], operation: APIOperation, mode: GenerationMode) -> None:
    """Check what is drawn for a route."""
    few = settings(max_examples=EXAMPLES, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    few(given(operation.as_strategy(generation_mode=mode))(check))()
