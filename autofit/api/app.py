"""The application: its routes, who may ask, and what it holds while it lives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from fastapi_swagger import patch_fastapi

from autofit import __version__
from autofit.api import problems
from autofit.api.middleware import access, bodies, metrics
from autofit.api.page import ROUTES as PAGES
from autofit.api.page import static
from autofit.api.routes import answers, catalog, estimates, health, searches
from autofit.api.routes.common import PROBLEM, NamedModels
from autofit.api.routes.remembered import Answers
from autofit.api.schema import examples
from autofit.operations.service.prediction_process import PredictionProcess
from autofit.store import Store

if TYPE_CHECKING:
    from autofit.operations.service.runner import Runner


def create_app(
    store: Store,
    *,
    token: str | None = None,
    loopback: bool = False,
    closed: bool | None = None,
    runner: Runner | None = None,
    models: Path | None = None,
) -> FastAPI:
    """The application over an open store. `token` is the operator's, which may do everything; the store may have
    others. If `closed`, as by default with a token, every request needs one, except those that ask whether the server
    lives. Otherwise who has none may read: any web page could have the user's browser start a search. On `loopback`,
    whoever has none is answered only if the Host header names this machine. `runner` is the server's own. Clients may
    name the models of the folder `models`."""
    estimating, predicting = PredictionProcess(), PredictionProcess()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        estimating.close()
        predicting.close()

    app = FastAPI(
        title="autofit",
        version=__version__,
        description="Measured answers: which training configuration fits a GPU, and which of them is fastest.",
        responses={"4XX": PROBLEM, "5XX": PROBLEM},
        dependencies=[Depends(access.BEARER)],
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    patch_fastapi(app, redirect_from_root_to_docs=False)  # /docs, whose script FastAPI itself loads from elsewhere
    app.state.store = store
    app.state.runner = runner
    app.state.models = NamedModels(None if models is None else models.resolve())
    app.state.estimating, app.state.predicting = estimating, predicting
    app.state.answers = Answers()
    app.state.metrics = metrics.Metrics(store)
    for group in (answers, estimates, searches, catalog, health):
        app.include_router(group.ROUTES)
    app.include_router(PAGES)
    app.mount(static.PREFIX, static.FILES)
    examples.install(app)
    problems.install(app)
    app.add_middleware(bodies.LimitedBody)
    access.install(app, store, token=token, closed=token is not None if closed is None else closed, loopback=loopback)
    app.add_middleware(metrics.Observed, app.state.metrics)  # the last one added is the first that sees a request
    return app
