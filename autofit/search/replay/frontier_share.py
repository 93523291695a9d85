"""How much of a problem's frontier some trials have found."""

from __future__ import annotations

from collections.abc import Iterable

from autofit.outcome import Fits, Measurement
from autofit.search.replay.hypervolume import hypervolume
from autofit.search.replay.recorded import Recorded
from autofit.search.replay.trace import Run


class FrontierShare:
    """Share of the exhaustive frontier's hypervolume; the whole is found once."""

    def __init__(self, recorded: Recorded) -> None:
        self._reference = recorded.reference
        self._whole = hypervolume(_corners(p.measurement for p in recorded.frontier), self._reference)

    def of(self, runs: Iterable[Run]) -> float:
        """Of those that fit among the runs; 0 without any. Where the frontier has no area, 1 with any."""
        fitted = [run.outcome.measurement for run in runs if isinstance(run.outcome, Fits)]
        return hypervolume(_corners(fitted), self._reference) / self._whole if self._whole else float(bool(fitted))


def _corners(measured: Iterable[Measurement]) -> list[tuple[float, float]]:
    return [(float(m.device_bytes), m.tokens_per_second) for m in measured]
