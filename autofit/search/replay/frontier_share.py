"""How much of a problem's frontier a set of trials has found."""

from __future__ import annotations

from collections.abc import Iterable

from autofit.outcome import Fits, Measurement
from autofit.search.replay.hypervolume import hypervolume
from autofit.search.replay.recorded import Recorded
from autofit.search.replay.trace import Run


class FrontierShare:
    """Share of the exhaustive frontier's hypervolume, which is computed once."""

    def __init__(self, recorded: Recorded) -> None:
        self._reference = recorded.reference
        self._whole = hypervolume(_corners(p.measurement for p in recorded.frontier), self._reference)

    def of(self, runs: Iterable[Run]) -> float:
        """The share of those runs that fit; 0 if none does. Where the frontier has no area, 1 if any does."""
        fitted = [run.outcome.measurement for run in runs if isinstance(run.outcome, Fits)]
        return hypervolume(_corners(fitted), self._reference) / self._whole if self._whole else float(bool(fitted))


def _corners(measured: Iterable[Measurement]) -> list[tuple[float, float]]:
    return [(float(m.device_bytes), m.tokens_per_second) for m in measured]
