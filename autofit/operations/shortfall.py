"""Nothing fits: why, and what came closest, for people in a line and for programs as a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.errors import NothingFits
from autofit.frontier import Point


class Shortfall(NothingFits):
    """No config fits `memory_limit_bytes`; `closest` is the config that needs least, None where none was measured."""

    def __init__(self, message: str, *, memory_limit_bytes: int, closest: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.memory_limit_bytes = memory_limit_bytes
        self.closest = closest

    def to_json(self) -> dict[str, Any]:
        """As the JSON object that stands in the answer's place."""
        return {
            "outcome": "nothing_fits",
            "reason": str(self),
            "memory_limit_bytes": self.memory_limit_bytes,
            "closest": None if self.closest is None else dict(self.closest),
        }


def closest_point(point: Point, memory_limit_bytes: int) -> dict[str, Any]:
    """A measured config that is too heavy, and by how much."""
    over = point.measurement.device_bytes - memory_limit_bytes
    return {**point.to_json(), "provenance": "measured", "over_limit_bytes": over}
