"""One execution of a trial's request: what it came to, and under which conditions."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.device.state import DeviceState
from autofit.core.document import Document, read
from autofit.core.outcome import Outcome, outcome_from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Document):
    """What running a request has given."""

    outcome: Outcome
    seconds: float
    """Wall time of the trial, without the time for which it waited for its device."""
    device_state: DeviceState | None = None
    """None where it was not observed."""
    waited_seconds: float = 0.0
    """How long it waited for its device before that."""
    node: str = field(default_factory=platform.node)
    """The machine that it ran on, where this is made; of several, the first rank's."""
    worker: str = ""
    """Which of a pool's workers ran it; empty where there is only one."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attempt:
        return read(cls, {**data, "outcome": outcome_from_json(data["outcome"])})
