"""The layers of the search's statistics, each with how it is taken away: what is not worth its lines should go.

Nothing in the search knows of this. A layer is taken away, or added where a replay has none, by replacing constants and
functions of the search's modules in the process that runs a benchmark.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from autofit.bench.made_device import MadeDevice
from autofit.lattice import Config
from autofit.outcome import Fits, Trial
from autofit.repeatability import Execution, between_executions
from autofit.search import advice, step_times
from autofit.search.adviser import Adviser
from autofit.search.knowledge import Knowledge
from autofit.search.loop import Search
from autofit.search.replay import ours

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and what stands there for the time of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer, as it is present and as it is absent. What is not replaced is the search as it is."""

    what: str
    present: Callable[[MadeDevice], Sequence[Patch]] = lambda device: ()
    absent: Callable[[MadeDevice], Sequence[Patch]] = lambda device: ()
    workers: int = 1
    """Of the searches with it and without: some layers only matter where several trials are under way."""

    @contextmanager
    def applied(self, device: MadeDevice, *, present: bool) -> Iterator[None]:
        """Searches of this process have the layer meanwhile, or lack it."""
        patches = (self.present if present else self.absent)(device)
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
        try:
            for owner, name, value in patches:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in reversed(before):
                setattr(owner, name, value)


def _one_width(device: MadeDevice) -> Sequence[Patch]:
    return (step_times, "EFFECT_SCALES", (1.0,)), (step_times, "NOISE_SCALES", (1.0,))


def _no_causes(device: MadeDevice) -> Sequence[Patch]:
    return ((step_times, "MOST_CAUSES", 0),)


def _no_bounds(device: MadeDevice) -> Sequence[Patch]:
    return ((Knowledge, "recall_bounds", lambda self, trials: None),)


def _nothing_under_way(device: MadeDevice) -> Sequence[Patch]:
    return ((advice.Advice, "_under_way", lambda self: np.array([], dtype=np.intp)),)


def _certain_order(device: MadeDevice) -> Sequence[Patch]:
    return ((advice.Advice, "_order_doubt", lambda self: 0.0),)


def _never_doubtful(device: MadeDevice) -> Sequence[Patch]:
    return ((advice, "FEW", 0),)


def _no_suspects(device: MadeDevice) -> Sequence[Patch]:
    return ((advice, "SUSPICIOUS", math.inf),)


def _no_area(device: MadeDevice) -> Sequence[Patch]:
    return ((advice, "AREA_BESIDE", 0.0),)


def _between_own(device: MadeDevice) -> Sequence[Patch]:
    """The variance between executions that a search's own trials show: a replay has no store that would."""

    def search(**asked: Any) -> Search:
        runs: defaultdict[Config, list[Execution]] = defaultdict(list)

        def save(trial: Trial) -> Trial:
            if isinstance(trial.outcome, Fits) and not trial.outcome.measurement.stopped_early:
                measured = trial.outcome.measurement
                if measured.step_seconds.relative_spread is not None:
                    runs[trial.config].append((measured.tokens_per_second, measured.step_seconds.relative_spread))
            return trial

        return Search(**{**asked, "save": save, "between": lambda: between_executions(runs.values())})

    return ((ours, "Search", search),)


def _between_told(device: MadeDevice) -> Sequence[Patch]:
    """The variance that a device has, as a store with many searches on it would tell."""

    def search(**asked: Any) -> Search:
        return Search(**{**asked, "between": lambda: device.noise})

    return ((ours, "Search", search),)


def _without_study(device: MadeDevice) -> Sequence[Patch]:
    def ask(self: Adviser, seconds_left: float | None = None) -> Config:
        config = (self.advice.best(seconds_left) or self.advice.first()).config
        self._knowledge.take(config)
        return config

    def tell_study(self: Adviser, trial: Trial) -> None:
        if self._values(trial) is None:
            self._knowledge.give_back(trial.config)

    return (Adviser, "ask", ask), (Adviser, "_tell_study", tell_study)


LAYERS: Mapping[str, Layer] = {
    "widths": Layer(what="the mixture of prior widths", absent=_one_width),
    "causes": Layer(what="causes of unforeseen slowness", absent=_no_causes),
    "bounds": Layer(what="what trials that ended early show of steps", absent=_no_bounds),
    "order-doubt": Layer(what="the chance that the time order does not hold", absent=_certain_order),
    "few": Layer(what="going on while few configs are measured and much may be missed", absent=_never_doubtful),
    "suspects": Layer(what="a trial without what all slow ones share", absent=_no_suspects),
    "under-way": Layer(
        what="what is expected of trials under way, with four workers", absent=_nothing_under_way, workers=4
    ),
    "area": Layer(what="area weights", absent=_no_area),
    "between": Layer(what="variance between executions, from the search's own trials", present=_between_own),
    "between-told": Layer(what="variance between executions, as a full store tells it", present=_between_told),
    "study": Layer(what="the study that is told but never read back", absent=_without_study),
}
"""By the name that `benchmarks/replay_devices.py --ablate` takes."""
