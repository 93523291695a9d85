"""One execution of a trial's request: what it came to, and under which conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.core.device.state import DeviceState
from autofit.core.outcome import Outcome, outcome_from_json, outcome_to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What running a request has given."""

    outcome: Outcome
    seconds: float
    """Wall time of the trial, without the time for which it waited for its device."""
    device_state: DeviceState | None = None
    """None where it was not observed."""
    waited_seconds: float = 0.0
    """How long it waited for its device before that."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        state = None if self.device_state is None else self.device_state.to_json()
        return {
            "outcome": outcome_to_json(self.outcome),
            "seconds": self.seconds,
            "device_state": state,
            "waited_seconds": self.waited_seconds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attempt:
        """The inverse of `to_json`."""
        state = data.get("device_state")
        return cls(
            outcome=outcome_from_json(data["outcome"]),
            seconds=data["seconds"],
            device_state=None if state is None else DeviceState.from_json(state),
            waited_seconds=data.get("waited_seconds", 0.0),
        )
