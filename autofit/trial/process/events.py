"""What a trial's child tells its parent: one JSON line for each event, on a pipe.

Standard output is left to whatever libraries print.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from autofit.core.document import LastingDocument
from autofit.core.outcome import Outcome, outcome_from_json
from autofit.trial.measure import process_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(LastingDocument):
    """Something that has happened in a trial. Fields that say nothing have their defaults, and are not sent."""

    phase: str | None = None
    """The phase that begins."""
    room_bytes: int | None = None
    """What is left of the memory limit when it begins; None without a limit."""
    share: float | None = None
    """Work begins that is at least this share of an optimizer step's."""
    least_step_seconds: float = 0.0
    """What an optimizer step takes at least, as micro-steps have shown."""
    earned: bool = False
    """A micro-step has shown that the trial may beat every rival."""
    timing: bool | None = None
    """Whether the timed part begins or ends."""
    step_seconds: float | None = None
    """Of an optimizer step that has ended."""
    steps: int = 0
    """Optimizer steps that a user's program has reported so far."""
    peak_bytes: int | None = None
    """Of a phase that has ended."""
    result: Outcome | None = None
    """The trial's outcome."""
    recording: bool = False
    """Whether a recording worth waiting for follows the result."""

    def to_json(self) -> dict[str, Any]:
        said = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        return {name: value for name, value in LastingDocument.to_json(self).items() if name in said}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Event:
        """Raises `TypeError` or `ValueError` for what is no event."""
        if data.get("result") is not None:
            data = {**data, "result": outcome_from_json(data["result"])}
        return super(Event, cls).from_json(data)


class EventPipe:
    """The child's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.phase = "start"
        self.shares: Mapping[str, float] = {}
        """By phase: what share of an optimizer step its work is at least, as far as that is known."""

    def enter(self, phase: str, share: float | None = None) -> None:
        """A phase begins, so that the parent knows which one a killed child was in; or, within one, work that is at
        least that `share` of an optimizer step's: by default `shares` says how much."""
        share = share or self.shares.get(phase)
        if phase != self.phase:
            self.phase = phase
            self.send(Event(phase=phase, room_bytes=process_memory.room(), share=share))
        elif share is not None:
            self.send(Event(share=share))

    def send(self, event: Event) -> None:
        data = (json.dumps(event.to_json(), allow_nan=False) + "\n").encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
