"""What Prometheus is told: requests as they come, and the store's state when it asks."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from uuid import uuid4

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autofit.core.errors import StoreError
from autofit.operations.prediction_errors import LATEST, prediction_errors
from autofit.store import Store

LOG = logging.getLogger("autofit.api.requests")
"""A JSON object for each request, where `autofit serve --log-requests` sends it."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The figures of one server."""

    def __init__(self, store: Store) -> None:
        self.registry = CollectorRegistry()
        names = ["method", "route"]
        self._requests = Counter("autofit_requests", "Requests answered", [*names, "status"], registry=self.registry)
        self._seconds = Histogram(
            "autofit_request_seconds", "Time to answer", names, buckets=SECONDS, registry=self.registry
        )
        self.registry.register(_StoreGauges(store))

    def note(self, request: Request, status: int, seconds: float) -> None:
        """Count an answer, under its route's path: a client that makes paths up makes no new series."""
        route = getattr(request.scope.get("route"), "path", "none")
        self._requests.labels(request.method if route != "none" else "any", route, str(status)).inc()
        self._seconds.labels(request.method if route != "none" else "any", route).observe(seconds)


class _StoreGauges:
    """Gauges that are read off the store whenever Prometheus asks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of_trials = lru_cache(maxsize=1)(self._read_trials)

    def _read_trials(self, version: str) -> tuple[dict[str, int], dict[str, float]]:
        """Trials by outcome, and the errors of their predictions; `version` is that of all trials."""
        return self._store.outcomes(), prediction_errors(self._store)

    def collect(self) -> Iterator[Metric]:
        """The gauges; of a store that does not answer only that it does not."""
        try:
            gauges = list(self._gauges())
        except StoreError:
            gauges = []
        yield _gauge("autofit_store_up", "Whether the store answers", float(bool(gauges)))
        yield from gauges

    def _gauges(self) -> Iterator[Metric]:
        queue, (outcomes, errors) = self._store.queue.status(), self._of_trials(self._store.version())
        yield _gauge("autofit_trials", "Stored trials", outcomes, "outcome")
        yield _gauge("autofit_searches", "Searches", queue.searches, "state")
        yield _gauge("autofit_queue_seconds", "How long the first queued search has waited", queue.waited_seconds)
        yield _gauge(
            "autofit_lease_age_seconds",
            "Since the least recent renewal of a running search's lease",
            queue.lease_age_seconds,
        )
        what = f"Median relative error of the last {LATEST} predictions"
        yield _gauge("autofit_prediction_error", what, errors, "figure")


def _gauge(name: str, what: str, value: float | Mapping[str, float], label: str = "") -> GaugeMetricFamily:
    if not isinstance(value, Mapping):
        return GaugeMetricFamily(name, what, value=value)
    gauge = GaugeMetricFamily(name, what, labels=[label])
    for key, figure in value.items():
        gauge.add_metric([key], figure)
    return gauge


class Observed:
    """Counts, times and logs every request; each has an id, given by the client or made here."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, started, answered = Request(scope), time.perf_counter(), False
        given = request.headers.get("x-request-id", "")
        request_id = given if given.isascii() and given.isprintable() and 0 < len(given) <= 64 else uuid4().hex

        def note(status: int) -> None:
            nonlocal answered
            answered, seconds = True, time.perf_counter() - started
            self._metrics.note(request, status, seconds)
            if LOG.isEnabledFor(logging.INFO):
                LOG.info(_line(request, request_id, status, seconds))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-request-id", request_id.encode()))
                note(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if not answered:
                note(500)


def _line(request: Request, request_id: str, status: int, seconds: float) -> str:
    token = getattr(request.state, "token", None)
    named = request.scope.get("path_params", {}).get("search_id")
    return json.dumps(
        {
            "request_id": request_id,
            "method": request.method,
            "path": request.scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
            "token": None if token is None else token.name,
            "search_id": getattr(request.state, "search_id", named),  # the route says it that starts one
        }
    )
