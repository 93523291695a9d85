"""Estimates looked up in the store, and a store that fails without failing who asks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from unit.operations.made_trials import make_job
from unit.store.test_store_failures import locked, sql

from autofit.core.lattice import Config
from autofit.core.prediction import StepWork
from autofit.core.units import GIB
from autofit.estimate.assumptions import assumptions
from autofit.estimate.estimate import Estimate
from autofit.estimate.footprint import Footprint
from autofit.estimate.identity import EstimateKeys
from autofit.estimate.time.guessed_rates import guess
from autofit.prediction.estimate_cache import EstimateCache
from autofit.store import Store
from autofit.techniques import Job, complete

JOB = replace(make_job(), context_bytes=GIB)
ON_CPU = replace(JOB, hardware=replace(JOB.hardware, kind="cpu"), context_bytes=None)
FOOTPRINT = Footprint(
    config=complete({"method": "qlora", "rank": 64, "compile": True}),
    hardware="h100-80g",
    memory_limit_bytes=80 * GIB,
    peak_allocated_bytes=19 * GIB,
    peak_reserved_bytes=20 * GIB,
    device_bytes=21 * GIB,
    host_bytes=0,
    breakdown={"weights": 16 * GIB, "activations": 3 * GIB, "fragmentation": GIB, "context": GIB},
    phase_peaks={"forward": 18 * GIB, "backward": 19 * GIB, "optimizer": 17 * GIB},
    seconds_to_estimate=0.1 + 0.2,
    work=StepWork(amounts={"product/bf16/nt": 1e15, "elementwise/bf16/far": 2.5e12, "launch": 3e4}, estimator=2),
)
OTHER = replace(FOOTPRINT, config=FOOTPRINT.config.replace(micro_batch=2))
RATES = guess(flops=1e15, wide_flops=5e13, bandwidth=3e12)
BOTH = [FOOTPRINT.config, OTHER.config]


def find(store: Store | None, *configs: Config, job: Job = JOB, limit: int = 80 * GIB) -> list[Footprint]:
    """What is known of configs, of both if none is given."""
    return list(EstimateCache(job, store).find(configs or BOTH, memory_limit_bytes=limit).values())


def keep(store: Store | None, *footprints: Footprint) -> None:
    EstimateCache(JOB, store).keep(footprints)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A SQLite file that is not there yet."""
    return tmp_path / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """An empty store that waits for no lock."""
    with Store.open(f"sqlite:///{path}?timeout=0.1") as opened:
        yield opened


def test_a_footprint_survives_json_unchanged_and_that_of_a_whole_estimate() -> None:
    """Estimates were stored whole, and by later versions with more."""
    document = FOOTPRINT.to_json()
    assert Footprint.from_json(document) == FOOTPRINT
    whole = Estimate.of(FOOTPRINT, JOB, RATES).to_json()
    assert Footprint.from_json({**whole, "of a later version": 1}) == FOOTPRINT


def test_a_prediction_says_what_the_estimate_says() -> None:
    estimate = Estimate.of(FOOTPRINT, JOB, RATES)
    prediction = estimate.prediction
    for field in fields(prediction):
        assert getattr(prediction, field.name) == getattr(estimate, field.name)
    assert prediction.fits(21 * GIB) and not prediction.fits(21 * GIB - 1)


def test_what_is_kept_is_known_under_any_limit(store: Store) -> None:
    cache = EstimateCache(JOB, store)
    assert cache.find(BOTH, memory_limit_bytes=80 * GIB) == {}
    cache.keep([FOOTPRINT])
    assert cache.find(BOTH, memory_limit_bytes=80 * GIB) == {FOOTPRINT.config: FOOTPRINT}
    (tight,) = find(store, limit=19 * GIB)
    assert tight == replace(FOOTPRINT, memory_limit_bytes=19 * GIB)
    assert not tight.fits_device


def test_under_a_limit_that_decides_what_the_allocator_keeps_only_an_estimate_for_that_limit_is_known(
    store: Store,
) -> None:
    """FOOTPRINT has 1 of its 21 GiB in the allocator's cache, which may go back."""
    squeezed = replace(OTHER, memory_limit_bytes=20 * GIB, device_bytes=20 * GIB, gives_back_cache=True)
    keep(store, FOOTPRINT, squeezed)
    assert find(store, limit=20 * GIB) == [squeezed]
    assert find(store, limit=21 * GIB) == [replace(FOOTPRINT, memory_limit_bytes=21 * GIB)]
    EstimateCache(ON_CPU, store).keep([replace(FOOTPRINT, breakdown={**FOOTPRINT.breakdown, "context": 0})])
    assert len(find(store, job=ON_CPU, limit=20 * GIB)) == 1, "a heap gives nothing back"
    too_much = replace(squeezed, memory_limit_bytes=18 * GIB)
    assert too_much.under(21 * GIB) is None, "it may reserve more where it can"
    assert too_much.under(17 * GIB) == replace(too_much, memory_limit_bytes=17 * GIB)
    again = replace(squeezed, config=FOOTPRINT.config)
    keep(store, again)
    assert find(store, FOOTPRINT.config, limit=20 * GIB) == [again], "made once for each change of the limit"


def test_what_was_made_with_another_context_is_known_with_this_one(store: Store) -> None:
    keep(store, FOOTPRINT)
    larger = replace(JOB, context_bytes=3 * GIB)
    (result,) = find(store, job=larger)
    assert result.device_bytes == FOOTPRINT.device_bytes + 2 * GIB and result.breakdown["context"] == 3 * GIB
    assert result.peak_reserved_bytes == FOOTPRINT.peak_reserved_bytes
    assert sum(result.breakdown.values()) == result.device_bytes
    assert find(store, job=larger, limit=22 * GIB) == [], "the allocator may have to give back"
    paged = replace(FOOTPRINT, config=FOOTPRINT.config.replace(optimizer="paged-adamw-8bit"))
    assert paged.under(80 * GIB, 3 * GIB) is None, "more may be paged out"
    assert paged.under(60 * GIB) is None and paged.under(80 * GIB) == paged, "the limit decides that, too"
    assert EstimateKeys(JOB).of(FOOTPRINT.config) == EstimateKeys(larger).of(FOOTPRINT.config)


def test_borrowed_fragmentation_decides_under_no_limit_what_fits(store: Store) -> None:
    keep(store, replace(FOOTPRINT, borrowed_error=0.1))
    assert find(store, limit=23 * GIB) == [], "it may need 23.1 GiB"
    assert [e.fits_device for e in find(store, limit=24 * GIB)] == [True]
    assert [e.fits_device for e in find(store, limit=19 * GIB)] == [False], "more is allocated"


def test_what_is_borrowed_says_so() -> None:
    job = make_job()
    plain, borrowed = (assumptions(replace(FOOTPRINT, borrowed_error=error), job) for error in (0.0, 0.1))
    (sentence,) = set(borrowed) - set(plain)
    assert "may be up to 10% higher" in sentence


def test_what_a_formula_says_is_not_kept(store: Store) -> None:
    keep(store, replace(FOOTPRINT, untraced="it cannot be followed"), OTHER)
    assert find(store) == [OTHER]


def test_a_predictions_fit_allows_for_its_error() -> None:
    rough = Estimate.of(replace(FOOTPRINT, untraced="it cannot be followed"), JOB).prediction
    assert not rough.fits(31 * GIB) and rough.fits(32 * GIB)


def test_without_a_store_nothing_is_known() -> None:
    keep(None, FOOTPRINT)
    assert find(None) == []


def test_a_locked_store_fails_nobody(store: Store, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = EstimateCache(JOB, store)
    with locked(path), caplog.at_level(logging.WARNING):
        cache.keep([FOOTPRINT])
        cache.keep([FOOTPRINT])
    assert "locked by another process" in caplog.text
    assert len(caplog.records) == 1, "what fails once is not waited for again"
    assert cache.find(BOTH, memory_limit_bytes=80 * GIB) == {}
    assert find(store) == []


def test_a_damaged_store_fails_nobody(store: Store, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sql(f"sqlite:///{path}", "DROP TABLE estimates")
    with caplog.at_level(logging.WARNING):
        assert find(store) == []
    assert "estimates" in caplog.text


def test_an_estimate_that_makes_no_sense_is_made_anew(store: Store) -> None:
    keys = EstimateKeys(JOB)
    store.estimates.keep({keys.of(FOOTPRINT.config): {"device_bytes": 1}, keys.of(OTHER.config): OTHER.to_json()})
    assert find(store) == [OTHER]


def test_what_json_has_not_is_not_kept(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    keep(store, replace(FOOTPRINT, seconds_to_estimate=float("inf")))
    assert find(store) == []
