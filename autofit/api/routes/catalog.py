"""Routes that list what can be asked about: models, hardware, search spaces."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse

from autofit.api.routes.common import OpenedStore, Strict
from autofit.api.schema.documents import HardwareAnswer, ModelAnswer, SpaceAnswer
from autofit.catalog.hardware import cards
from autofit.catalog.models import listing
from autofit.planning.lattices import space_summaries

ROUTES = APIRouter(route_class=Strict)


@ROUTES.get("/v1/models", summary="The models of the catalog", responses={200: {"model": list[ModelAnswer]}})
def models() -> JSONResponse:
    return JSONResponse(listing())


@ROUTES.get(
    "/v1/hardware",
    summary="The cards of the catalog, and what trials have run on",
    responses={200: {"model": HardwareAnswer}},
)
def hardware(store: OpenedStore) -> JSONResponse:
    measured = [h.to_json() for h in store.hardware()]
    return JSONResponse({"cards": [card.to_json() for card in cards()], "measured": measured})


@ROUTES.get("/v1/spaces", summary="The built-in search spaces", responses={200: {"model": list[SpaceAnswer]}})
def spaces(
    global_batch: Annotated[int, Query(ge=1, le=2**20, description="Sequences per optimizer step")] = 64,
) -> JSONResponse:
    return JSONResponse(space_summaries(global_batch))
