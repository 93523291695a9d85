"""The link between the machines of a trial's ranks: measured once for each spread, and used for no other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest
from unit.operations.made_trials import HARDWARE, OPTIONS, STACK, WORK, fits, make_job, make_prediction, make_trial
from unit.operations.made_world import World
from unit.operations.test_probing import made_probe
from unit.search.made_truth import FakePool

from autofit.core.device.hardware import Hardware
from autofit.core.device.probe import BETWEEN_RANKS, COLLECTIVES, ProbePart, between, collective
from autofit.core.device.work_kinds import LINK
from autofit.operations import SearchRequest, search
from autofit.prediction import machine_link
from autofit.prediction.calibration import rates_for
from autofit.store import Store
from autofit.techniques import Job
from autofit.workers.pool import Pool

TWO = replace(OPTIONS, devices=2)
SPREAD, TOGETHER = make_job(TWO), make_job(TWO, hardware=replace(HARDWARE, count=2))
"""Two ranks on two machines, and on one. NVLink of an H100: 450 GB/s one way, of which three quarters are assumed."""


def link(rate: float = 0.5e9, part: str = between(HARDWARE, 2), **changes: object) -> ProbePart:
    """One over which each rank reduces at `rate` and gathers twice as fast."""
    rates = zip(COLLECTIVES, (rate, 2.0 * rate), strict=True)
    made = ProbePart(name=part, seconds=9.0, figures={collective(name, part): value for name, value in rates})
    return replace(made, **changes)  # type: ignore[arg-type]


@dataclass
class Workers:
    """They measure what they are told to."""

    links: list[ProbePart] = field(default_factory=list)

    def link(self) -> ProbePart:
        return self.links.pop(0)


def make_sure(store: Store, *links: ProbePart, job: Job = SPREAD, fresh: bool = False) -> int:
    """How many of these are measured."""
    workers = Workers(list(links))
    machine_link.make_sure(job, store, cast("Pool", workers), fresh=fresh)
    return len(links) - len(workers.links)


def predicted_rate(job: Job, store: Store) -> float:
    """Bytes per second between ranks."""
    rates = rates_for(job, store)
    assert rates is not None
    return 1.0 / rates.transfers[LINK]


def test_each_way_to_spread_ranks_over_machines_is_told_apart() -> None:
    def of(count: int, ranks: int, **changes: object) -> str:
        return between(replace(HARDWARE, count=count, **changes), ranks)  # type: ignore[arg-type]

    spreads = {of(1, 2), of(1, 4), of(2, 4), of(4, 8)}
    assert len(spreads) == 4 and BETWEEN_RANKS not in spreads
    together = {of(2, 2), of(8, 4), of(1, 1), of(1, 2, kind="cpu"), of(1, 2, host_memory_bytes=0)}
    assert together == {BETWEEN_RANKS}, "processors' ranks share one, and so do all cards of the catalog"


def test_it_is_measured_once_said_and_used_for_its_own_spread(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    assert predicted_rate(SPREAD, store) == predicted_rate(TOGETHER, store) == pytest.approx(0.75 * 450e9)
    assert make_sure(store, link()) == 1
    said = "autofit: between machines: 0.5 GB/s, 675 times less than is assumed within one"
    assert caplog.messages == [said]
    assert predicted_rate(SPREAD, store) == pytest.approx(0.5e9)
    four_on_two = make_job(replace(OPTIONS, devices=4), hardware=replace(HARDWARE, count=2))
    for other in (TOGETHER, four_on_two, make_job(TWO, stack=replace(STACK, torch="2.99.0"))):
        assert predicted_rate(other, store) == pytest.approx(0.75 * 450e9)
    assert make_sure(store) == 0 and caplog.messages == [said, said]
    assert make_sure(store, link(2e9), fresh=True) == 1
    assert predicted_rate(SPREAD, store) == pytest.approx(2e9)


def test_it_is_held_against_what_was_measured_within_a_machine(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    within = link(5e9, BETWEEN_RANKS)
    store.probes.keep(made_probe(parts=(*made_probe().parts, within)))
    make_sure(store, link())
    assert caplog.messages == ["autofit: between machines: 0.5 GB/s, 10 times less than within one"]
    assert (predicted_rate(SPREAD, store), predicted_rate(TOGETHER, store)) == pytest.approx((0.5e9, 5e9))


def test_a_failure_costs_only_the_figure_and_is_said_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    assert make_sure(store, link(figures={}, failure="rank 1: the ranks cannot meet")) == 1
    said = "autofit: the link between machines could not be measured: rank 1: the ranks cannot meet"
    assert caplog.messages == [said]
    assert predicted_rate(SPREAD, store) == pytest.approx(0.75 * 450e9)
    assert make_sure(store, link()) == 1, "the next search tries again"


@pytest.mark.parametrize("hardware", [replace(HARDWARE, count=2), replace(HARDWARE, name="emulated-h100-80g")])
def test_nothing_is_measured_on_one_machine_or_of_emulated_cards(store: Store, hardware: Hardware) -> None:
    assert make_sure(store, link(), job=make_job(TWO, hardware=hardware)) == 0


def test_trials_over_another_link_show_nothing_of_this_one(store: Store) -> None:
    """Those of one rank do, whose arithmetic is the same."""
    waiting = make_prediction(work=replace(WORK, waits={LINK: 1e9}))

    def add(job: Job, **config: object) -> None:
        trial = make_trial({"method": "full", **config}, fits(10, 1000), job=job)
        store.add(replace(trial, prediction=waiting))

    def fitted_to(job: Job) -> int:
        rates = rates_for(job, store)
        assert rates is not None
        return rates.calibrated_on

    add(TOGETHER, sharding="zero2")
    assert (fitted_to(SPREAD), fitted_to(TOGETHER)) == (0, 1)
    add(SPREAD, sharding="zero3")
    assert (fitted_to(SPREAD), fitted_to(TOGETHER)) == (1, 1)
    add(make_job(), offload="optimizer")
    assert (fitted_to(SPREAD), fitted_to(TOGETHER)) == (2, 2)


def test_a_search_over_machines_measures_before_its_first_trial(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []

    def measured(pool: FakePool) -> ProbePart:
        begun.append((len(pool.claims), len(pool.submitted)))
        return link()

    monkeypatch.setattr(FakePool, "link", measured, raising=False)
    world.site = HARDWARE, STACK
    request = SearchRequest(workload=TWO, store=str(tmp_path / "store.db"), ray_address="auto", max_trials=3)
    search(request)
    assert begun == [(0, 0)]
    with Store.open(request.store) as store:
        assert predicted_rate(SPREAD, store) == pytest.approx(0.5e9)
