"""The route that predicts what a config needs."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from autofit.api.models import Models
from autofit.api.routes.common import OpenedStore, Strict
from autofit.api.routes.query import EVAL_BATCH, LENGTHS, TRAINER, AskedLengths, lengths_of, only_hardware
from autofit.api.schema.documents import EstimateAnswer
from autofit.core.units import LARGEST_INTEGER, as_bytes
from autofit.operations.service.estimating import estimated

ROUTES = APIRouter(route_class=Strict)


class AskedEstimate(BaseModel):
    """The options of `autofit estimate`, by the same names and with the same defaults."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str = Field(description="Name of a catalog model")
    config: dict[str, str | int | bool] = Field(
        default={}, description="Axis -> value; absent axes take the plain recipe's"
    )
    hardware: str = Field(default="auto", description="Name of a card; auto: the only hardware that trials ran on")
    seq_len: int = Field(default=2048, ge=2, le=2**24, description="Tokens per sequence")
    global_batch: int = Field(default=64, ge=1, le=2**20, description="Sequences per optimizer step")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    devices: int = Field(default=1, ge=1, le=2**16)
    seed: int = Field(default=0, ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)
    trainer: str | None = Field(default=None, alias="for", description=TRAINER)
    lengths: AskedLengths = Field(default=None, description=LENGTHS)
    eval_batch: int | None = Field(default=None, ge=1, le=2**20, description=EVAL_BATCH)
    memory_limit: str | None = Field(default=None, description="Such as 24GiB; the card's memory if not given")
    advice: bool = Field(default=True, description="Also look for a change that makes it fit, or makes it faster")


@ROUTES.post(
    "/v1/estimates",
    summary="What a config needs, and how fast it is, predicted",
    responses={200: {"model": EstimateAnswer}},
)
def estimate(asked: AskedEstimate, store: OpenedStore, models: Models, request: Request) -> JSONResponse:
    told = {**asked.model_dump(exclude={"memory_limit", "hardware"}), "model": models.named(asked.model)}
    told["lengths"] = lengths_of(asked.lengths)
    told["memory_limit_bytes"] = as_bytes(asked.memory_limit)
    told["hardware"] = only_hardware(store) if asked.hardware == "auto" else asked.hardware
    return JSONResponse(request.app.state.estimating.call(estimated, told, store.url))
