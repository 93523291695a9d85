"""What the answers hold, for the API's description. `to_json` writes the documents, and tests hold them to these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.outcome import StepSeconds
from autofit.core.workload import Workload

ConfigValues = dict[str, str | int | bool]
"""Axis -> value."""
State = Literal["queued", "running", "succeeded", "nothing_fits", "failed", "cancelled"]
"""Of a search."""


class Answer(BaseModel):
    """A JSON object with the fields below and no other."""

    model_config = ConfigDict(extra="forbid")


class Loss(Answer):
    first: float
    last: float


class Measured(BaseModel):
    """What a trial has measured; docs/reference/json.md has all fields."""

    tokens_per_second: float
    step_seconds: StepSeconds
    mfu: float | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int = Field(description="What the driver shows: reserved memory and the context")
    host_peak_bytes: int
    phase_peaks: dict[str, int]
    loss: Loss | None = Field(description="Null for a user's program that reported none")
    steps: int
    setup_seconds: float


class Point(Answer):
    config: ConfigValues
    measurement: Measured
    trial_id: int


class FrontierAnswer(Answer):
    """The configs that no other of their method beats in both memory and speed, sorted by memory."""

    hardware: Hardware
    workload: Workload
    stack: Stack
    points: list[Point]
    trials: int
    out_of_memory: int
    contradictory: int


class Alternative(BaseModel):
    """Another config of interest, with its measurement or its estimate."""

    role: str = Field(examples=["lighter", "faster, does not fit", "other method"])
    config: ConfigValues
    over_limit_bytes: int = Field(description="By how much it exceeds the limit; negative if it fits")
    speedup: float = Field(description="Its tokens per second over the recommended config's")


class RecommendationAnswer(BaseModel):
    """The fastest config that fits: with its `measurement` if `provenance` is measured, else with its `estimate`."""

    config: ConfigValues
    provenance: Literal["measured", "predicted"]
    headroom_bytes: int
    memory_limit_bytes: int
    changes_training: list[str] = Field(description="What differs from the plain recipe, one sentence each")
    alternatives: list[Alternative]
    hardware: Hardware
    workload: Workload
    stack: Stack
    measurement: Measured | None = None
    estimate: dict[str, Any] | None = None
    trial_id: int | None = None
    verified: bool | None = Field(default=None, description="Whether a second run has confirmed it")
    contradictory: int | None = Field(default=None, description="Configs whose trials contradict each other")


class TrialAnswer(BaseModel):
    """One trial: its `measurement` if it fits, else the `reason` and what is known."""

    outcome: str = Field(examples=["fits", "out_of_memory"])
    config: ConfigValues
    hardware: Hardware
    stack: Stack
    workload: Workload
    measurement: Measured | None = None
    reason: str | None = None
    prediction: dict[str, Any] | None = None
    device_state: dict[str, Any] | None = None
    memory_limit_bytes: int
    seconds: float
    recorded_at: str
    trial_id: int


class TrialsAnswer(Answer):
    """A page of trials, newest first."""

    trials: list[TrialAnswer]
    total: int = Field(description="How many there are in all")
    next: int | None = Field(description="What to give as `before` for the next page; null on the last one")


class EstimateAnswer(BaseModel):
    """What a config needs and how fast it is, predicted; docs/reference/json.md has all fields."""

    provenance: Literal["predicted"]
    config: ConfigValues
    hardware: str
    fits: bool
    certainty: str | None = Field(examples=["sure", "likely", "unsure"])
    headroom_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    host_bytes: int
    memory_limit_bytes: int
    breakdown: dict[str, int] = Field(
        description="bytes by kind at the moment of the peak; their sum is `device_bytes`"
    )
    phase_peaks: dict[str, int]
    tokens_per_second: float | None
    step_seconds: float | None
    mfu: float | None
    seconds_to_estimate: float


class EventAnswer(Answer):
    """What has happened in a search."""

    seq: int = Field(description="1 for the first event of the search; there are no gaps")
    kind: State | Literal["planned", "trial", "set_aside"] = Field(description="A state that it has entered, or news")
    at: str
    body: dict[str, Any] = Field(description="By kind; docs/reference/http.md says which")


class ModelAnswer(Answer):
    name: str
    parameters: int | None
    source: str
    note: str | None


class CardAnswer(BaseModel):
    """A card of the catalog."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    supports: list[str] = Field(description="What autofit can do for it: estimate, search")
    source: str


class HardwareAnswer(Answer):
    """The cards of the catalog, and what trials have run on."""

    cards: list[CardAnswer]
    measured: list[Hardware] = Field(description="Most recently used first")


class SpaceAnswer(Answer):
    """A built-in search space."""

    name: str
    purpose: str
    devices: int
    configs: int = Field(description="Valid ones at this global batch, before the hardware rules any out")


class HealthAnswer(Answer):
    """The server is running."""

    status: Literal["ok"]
    version: str


class ReadyAnswer(Answer):
    """The server can answer, and run searches if it has a runner of its own."""

    status: Literal["ok"]
    store: Literal["ok"]
    runner: Literal["ok"] | None = Field(default=None, description="Left out by a server without a runner")


class ProblemAnswer(BaseModel):
    """Problem details (RFC 9457)."""

    type: str = Field(examples=["about:blank"])
    title: str = Field(examples=["Wrong request"])
    status: int = Field(examples=[400])
    detail: str = Field(examples=["unknown model 'lama-3.1-8b': did you mean llama-3.1-8b?"])
    memory_limit_bytes: int | None = Field(default=None, description="Where nothing fits: the limit")
    closest: dict[str, Any] | None = Field(
        default=None, description="Where nothing fits: the config that came closest, and by how much; null if none ran"
    )


def answers(model: Any, *media: str) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that may be asked conditionally; `media` are further types of its content."""
    content: dict[str, Any] = {name: {"schema": {"type": "string"}} for name in media}
    return {200: {"model": model, "content": content}, 304: {"description": "The client has the newest answer"}}
