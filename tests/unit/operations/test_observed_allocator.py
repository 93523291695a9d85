"""What trials in the store show of CUDA: whether its allocator has expandable segments, and its context."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import tiny_model
from tiny import CPU_HARDWARE
from unit.operations.made_trials import HARDWARE, fits, make_job, make_trial, out_of_memory
from unit.operations.test_calibration import CARD

from autofit.core.outcome import Trial
from autofit.estimate.assumptions import SEEN_CONTEXT_BYTES
from autofit.operations import Estimation, WorkloadOptions
from autofit.operations.explaining import Comparison
from autofit.planning.plan import Plan
from autofit.planning.requests import SearchRequest
from autofit.prediction import lattice_predictor, predicted_frontier
from autofit.prediction.calibration import as_trials_show, with_observed_allocator
from autofit.prediction.estimate_cache import EstimateCache
from autofit.prediction.lattice_predictor import LatticePredictor
from autofit.prediction.predicted_frontier import predict_frontier
from autofit.store import Store
from autofit.techniques import Job, complete

CONTEXT = 512 * 1024**2


def trained(segments: bool, second: int = 0, **values: object) -> Trial:
    """A trial that fitted, with or without expandable segments, and with a context."""
    outcome = fits(10, 1000)
    measured = replace(outcome.measurement, expandable_segments=segments)
    measured = replace(measured, device_bytes=measured.peak_reserved_bytes + CONTEXT - 5)
    trial = make_trial(values, replace(outcome, measurement=measured))
    return replace(trial, recorded_at=f"2026-03-01T00:00:{second:02}+00:00")


def known(store: Store | None, job: Job | None = None) -> tuple[bool | None, int | None]:
    result = as_trials_show(job or make_job(), store)
    return result.expandable_segments, result.context_bytes


def test_without_a_trial_that_fitted_it_is_not_known(store: Store) -> None:
    store.add(make_trial({}, out_of_memory()))
    assert known(None) == known(store) == (None, None)
    assert with_observed_allocator(make_job(), store.trials()) == make_job()


def test_a_users_program_does_not_show_it(store: Store) -> None:
    store.add(trained(True, micro_batch=1))
    users = trained(False, 1, micro_batch=2)
    store.add(replace(users, workload=replace(users.workload, program="python train.py")))
    assert known(store) == (True, CONTEXT)


def test_the_latest_trial_that_fitted_shows_it(store: Store) -> None:
    for second, segments in enumerate((True, False)):
        store.add(trained(segments, second, micro_batch=1 + second))
        store.add(make_trial({"method": "full", "micro_batch": 4}, out_of_memory()))
        assert known(store) == (segments, CONTEXT)
        assert with_observed_allocator(make_job(), store.trials(newest_first=True)) == as_trials_show(make_job(), store)
        elsewhere = replace(make_job(), hardware=CARD)
        assert known(store, elsewhere) == (segments, CONTEXT), "a card that is not here does as that one"
    unlike = replace(make_job(), hardware=replace(HARDWARE, device_name="NVIDIA H100 NVL"))
    assert known(store, unlike) == known(store, replace(make_job(), hardware=CPU_HARDWARE)) == (None, None)


def test_paged_states_hide_the_context(store: Store) -> None:
    store.add(trained(True, 1, optimizer="paged-adamw-8bit"))
    assert known(store) == (True, None)
    store.add(trained(False))
    assert known(store) == (True, CONTEXT), "an earlier trial without such states shows it"


def test_an_estimate_replays_the_allocator_that_trials_had(store: Store, path: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_model(vocabulary=4096, hidden=128).config))
    options, config = WorkloadOptions(model=str(tmp_path), seq_len=256, global_batch=4), complete({"method": "lora"})

    def found() -> tuple[int, int, bool]:
        made = Estimation.of(options, config, hardware=CARD.name, store=path).estimate()
        assumed = {word: any(word in said for said in made.assumptions) for word in ("expandable segments", "context")}
        assert assumed["context"] is assumed["expandable segments"]
        assert made.breakdown["context"] == (SEEN_CONTEXT_BYTES["9.0"] if assumed["context"] else CONTEXT)
        assert made.device_bytes == made.peak_reserved_bytes + made.breakdown["context"]
        return made.peak_allocated_bytes, made.breakdown["fragmentation"], assumed["context"]

    unknown = found()
    store.add(trained(True))
    assert found() == (*unknown[:2], False) and unknown[2]
    store.add(trained(False, 1))
    plain = found()
    assert plain[0] == unknown[0] and plain[1] != unknown[1] and not plain[2]


def test_every_answer_takes_it_from_the_store(store: Store, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_STORE", path)
    store.add(trained(False))
    options = WorkloadOptions(model="smollm2-135m", seq_len=128, global_batch=4)
    request = SearchRequest(workload=options, hardware=CARD.name, space="smoke", store=path)
    jobs = [
        Estimation.of(options, complete({"method": "full"}), hardware=CARD.name, store=path).job,
        Comparison(options, hardware=CARD.name)._calibration.job,
    ]

    def predict_all(known: EstimateCache, *args: object, **kwargs: object) -> dict[object, object]:
        jobs.append(known.job)
        return {}

    for module in (predicted_frontier, lattice_predictor):
        monkeypatch.setattr(module, "predict_all", predict_all)
    plan: Plan = predict_frontier(request).plan
    LatticePredictor(plan=plan, request=request, store=store).predict(lambda done, total: None)
    assert [(job.expandable_segments, job.context_bytes) for job in jobs] == [(False, CONTEXT)] * 4
