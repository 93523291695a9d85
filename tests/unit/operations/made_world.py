"""Whole searches without a device: workers look outcomes up in a world made by formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from unit.operations.made_trials import OPTIONS
from unit.search.made_truth import FakePool, Truth

from autofit.core.lattice import Config, Lattice
from autofit.core.outcome import Outcome
from autofit.core.units import GIB
from autofit.core.workload import Goal
from autofit.estimate.footprint import Footprint
from autofit.operations import SearchRequest
from autofit.operations.recording import record as recording
from autofit.operations.searching import search as searching
from autofit.planning.plan import Limits, Plan
from autofit.prediction import lattice_predictor
from autofit.prediction.lattice_predictor import LatticePredictor
from autofit.store import Store
from autofit.techniques import AXES, Job
from autofit.trial.machine.detection import detect
from autofit.trial.request import TrialRequest


class World:
    """Every pool that was opened, and how trials of the next ones end."""

    def __init__(self) -> None:
        self.pools: list[FakePool] = []
        self.special: Callable[[TrialRequest], Outcome | None] = lambda request: None
        self.on_wait: Callable[[], None] = lambda: None
        self.predict_all: Callable[..., dict[Config, Footprint]] = lambda *asked, **options: {}
        """Stands in for `predict_all`: no predictions, which would take longer than everything else."""
        self.site = detect("cpu")
        """The workers'."""

    @classmethod
    def in_place_of_workers(cls, monkeypatch: pytest.MonkeyPatch) -> World:
        """The world in which searches run for the rest of a test."""
        made = cls()
        monkeypatch.setattr(searching, "open_pool", made.open_pool)
        # A probe takes longer than everything else.
        monkeypatch.setattr(lattice_predictor, "make_sure", lambda *given, **asked: None)
        monkeypatch.setattr(recording, "_probed", lambda *asked: {})
        monkeypatch.setattr(
            lattice_predictor, "predict_all", lambda *asked, **options: made.predict_all(*asked, **options)
        )
        return made

    def open_pool(self, request: SearchRequest) -> FakePool:
        """Stands in for `searching.open_pool`."""
        job = request.workload.job(self.site)
        truth = Truth(job, Lattice(axes=AXES, configs=()), seed=1)  # outcomes are asked of it, and no configs
        self.pools.append(FakePool(truth, special=self.special, on_wait=self.on_wait))
        return self.pools[-1]


def predictor_of(
    job: Job, store: Store, configs: Sequence[Config], *, seconds: float | None = None, **request: Any
) -> LatticePredictor:
    """The predictor of a search on these configs under 1 GiB, with `seconds` for all of it."""
    plan = Plan(
        job=job,
        lattice=Lattice(axes=AXES, configs=tuple(configs)),
        lower_bounds=dict.fromkeys(configs, 1),
        goal=Goal(),
        limits=Limits(memory_bytes=GIB, seconds=seconds),
    )
    return LatticePredictor(plan=plan, request=SearchRequest(workload=OPTIONS, **request), store=store)
