"""Predictions of whole lattices: kept in the store, timed when they are read."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import tiny_model
from tiny import CPU_HARDWARE, CUDA_HARDWARE, STACK
from unit.operations.made_trials import OPTIONS, fits, make_trial
from unit.operations.made_world import predictor_of

from autofit.catalog.models import load
from autofit.core.device.hardware import Hardware
from autofit.core.device.probe import Probe, ProbePart
from autofit.core.device.work_kinds import LAYOUTS, product
from autofit.core.lattice import Config, Lattice
from autofit.core.units import GIB
from autofit.core.workload import Workload
from autofit.estimate import sweep
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.footprint import Footprint
from autofit.estimate.sharding import hosted
from autofit.planning.plan import Limits, Plan
from autofit.planning.requests import SearchRequest, WorkloadOptions
from autofit.prediction.calibration import rates_for
from autofit.prediction.estimate_cache import EstimateCache
from autofit.prediction.estimation import Estimation, site
from autofit.prediction.lattice_predictor import IMPORTS_BYTES, LatticePredictor
from autofit.prediction.predict_configs import predict_all
from autofit.store import Store
from autofit.techniques import AXES, Job, complete, parse
from autofit.trial.limits import control_groups

CONFIGS = [complete(parse(text)) for text in ("method=lora,micro_batch=2", "method=lora,micro_batch=1")]


@pytest.fixture(scope="module")
def job() -> Job:
    of = tiny_model(vocabulary=512, hidden=64)
    workload = Workload(model=of.name, model_digest=of.digest, seq_len=32, global_batch=2)
    hardware = replace(CUDA_HARDWARE, name="h100-80g")
    return Job(model=of, workload=workload, hardware=hardware, stack=STACK)


def timed(footprints: dict[Config, Footprint], job: Job, store: Store | None) -> dict[Config, Estimate]:
    """Their estimates at the rates that the store shows."""
    return {config: Estimate.of(footprint, job, rates_for(job, store)) for config, footprint in footprints.items()}


def test_what_was_kept_is_timed_by_what_was_measured_since(
    job: Job, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = timed(predict_all(EstimateCache(job, store), CONFIGS, memory_limit_bytes=GIB), job, store)
    assert list(before) == CONFIGS
    one = before[CONFIGS[0]]
    assert one.calibrated_on == 0 and one.step_seconds is not None
    tokens = job.workload.tokens_per_step
    outcome = fits(1, tokens / (5 * one.step_seconds), tokens=tokens)
    store.add(replace(make_trial(CONFIGS[0], outcome, job=job), prediction=one.prediction))
    monkeypatch.setattr(sweep, "sweep", None)  # nothing is traced again
    reports: list[tuple[int, int]] = []
    again = predict_all(
        EstimateCache(job, store),
        CONFIGS,
        memory_limit_bytes=2 * GIB,
        report=lambda done, of: reports.append((done, of)),
    )
    after = timed(again, job, store)
    assert reports == [(2, 2)]
    for config in CONFIGS:
        assert (after[config].calibrated_on, after[config].memory_limit_bytes) == (1, 2 * GIB)
        assert after[config].device_bytes == before[config].device_bytes
        assert after[config].step_seconds == pytest.approx(5 * before[config].step_seconds)


def test_a_card_outside_the_catalog_has_a_time_that_claims_little(job: Job) -> None:
    unlisted = replace(job, hardware=replace(job.hardware, name="rtx-a6000-48g", capability="8.6"))
    result = timed(predict_all(EstimateCache(unlisted, None), CONFIGS[:1], memory_limit_bytes=GIB), unlisted, None)[
        CONFIGS[0]
    ]
    assert result.work is not None and result.step_seconds is not None
    assert (result.relative_error, result.calibrated_on) == (1.0, 0)
    document = result.to_json()
    assert document["stand_in"] == "cards of compute capability 8.6, because rtx-a6000-48g is not in the catalog"


def test_what_was_kept_assumes_nothing_of_another_machines_host(job: Job, store: Store) -> None:
    """The key of an estimate does not include the host's memory."""
    config = complete(parse("method=lora,micro_batch=1,checkpointing=offload"))
    assumptions = []
    for there in (0, 64 * GIB):
        asked = replace(job, hardware=replace(job.hardware, host_memory_bytes=there))
        result = timed(predict_all(EstimateCache(asked, store), [config], memory_limit_bytes=GIB), asked, None)[config]
        assumptions.append(
            [sentence for sentence in result.assumptions if sentence.startswith("the host has enough memory")]
        )
    assert [len(sentences) for sentences in assumptions] == [1, 0]


def test_no_failure_of_the_estimator_reaches_who_asks(
    job: Job, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = predict_all(EstimateCache(job, store), CONFIGS[:1], memory_limit_bytes=GIB)

    def broken(*arguments: object, **more: object) -> None:
        raise RuntimeError("a process ended")

    monkeypatch.setattr(sweep, "sweep", broken)
    with caplog.at_level(logging.WARNING):
        assert predict_all(EstimateCache(job, store), CONFIGS, memory_limit_bytes=GIB) == kept
    assert "a process ended" in caplog.text


def test_no_more_processes_predict_than_the_control_group_has_cores_for(
    job: Job, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with a quota sees every core of its machine."""
    counts: list[object] = []

    def counted(job: Job, configs: list[Config], **options: object) -> dict[Config, Footprint]:
        counts.append(options["processes"])
        return {}

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(control_groups, "processors", lambda machine: min(machine, 3.5))
    monkeypatch.setattr(sweep, "sweep", counted)
    monkeypatch.setattr(sweep, "get_ready", lambda configs, processes: counts.append(processes))
    predictor_of(job, store, CONFIGS).get_ready()
    predict_all(EstimateCache(job, store), CONFIGS, memory_limit_bytes=GIB)
    assert counts == [3, 3]


def test_what_was_tried_under_a_higher_limit_shows_how_far_predictions_err(job: Job, store: Store) -> None:
    """Full training that cannot fit was not predicted, its size was guessed from adapters', and a trial of it said that
    adapters take twice as much as predicted: on an H200 under 24 GiB, LoRA of 17 GiB was left alone for that."""
    full = complete(parse("method=full,micro_batch=2"))
    request = SearchRequest(workload=OPTIONS)
    plan = Plan(
        job=job,
        lattice=Lattice(axes=AXES, configs=(full, *CONFIGS)),
        lower_bounds={full: 2 * GIB, **dict.fromkeys(CONFIGS, 1)},
        goal=request.goal,
        limits=Limits(memory_bytes=GIB),
        space="made",
    )

    def predicted() -> set[Config]:
        predictor = LatticePredictor(plan=plan, request=request, store=store)
        return set(predictor.predict(lambda done, total: None).by_config)

    # As the search under the higher limit did.
    predict_all(EstimateCache(job, store), [full], memory_limit_bytes=4 * GIB)
    assert predicted() == set(CONFIGS)
    fitted = fits(0.5, 100)
    fitted = replace(fitted, measurement=replace(fitted.measurement, expandable_segments=True))
    store.add(make_trial(full, fitted, job=job, limit=4 * GIB))
    assert predicted() == {full, *CONFIGS}


def test_without_predictions_the_host_is_a_limit_by_formula(
    job: Job, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The estimator, too, says 94 GiB of this training (benchmarks/offload_8b.yaml)."""
    of = load("llama-3.1-8b")
    card = Hardware(name="h100-80g", kind="cuda", device_name="x", memory_bytes=80 * GIB, capability="9.0", count=2)
    offloading, plain = (complete(parse(f"method=full,precision=bf16,offload={v}")) for v in ("params", "none"))

    def lacking(host_gib: int, ranks: int = 1, kind: str = "cuda") -> dict[Config, int]:
        workload = Workload(model=of.name, model_digest=of.digest, seq_len=64, global_batch=2 * ranks, devices=ranks)
        there = Job(
            model=of,
            workload=workload,
            hardware=replace(card, kind=kind, host_memory_bytes=host_gib * GIB),
            stack=STACK,
        )
        configs = [offloading, plain] if ranks == 1 else [offloading.replace(sharding="zero3")]
        return dict(predictor_of(there, store, configs, predict=False).predict(lambda done, total: None).beyond_host)

    assert lacking(64) == {offloading: pytest.approx(30 * GIB, abs=GIB)}
    assert lacking(128) == lacking(0) == lacking(64, kind="cpu") == {}
    assert list(lacking(64, ranks=2).values()) == [pytest.approx(30 * GIB, abs=GIB)], "both ranks share it"

    def fails(config: Config, of: Job) -> int:
        raise RuntimeError("a new kind of model")

    monkeypatch.setattr(hosted, "host_short_bytes", fails)
    assert lacking(1) == {} and "a new kind of model" in caplog.text


def keep_probe(job: Job, store: Store, slower: float) -> None:
    """Keep a probe of the job's device, on which products in bf16 are so many times slower than in fp32."""
    times = {"fp32": 1.0, "bf16": slower}
    rates = {product(f, layout): 1e-13 * times[f] for f in times for layout in LAYOUTS}
    store.probes.keep(
        Probe(
            hardware=job.hardware,
            stack=job.stack,
            model=job.model.name,
            shapes_key="",
            parts=(ProbePart(name="products", seconds=1.0, seconds_per=rates),),
            steps=(),
            seconds=1.0,
            recorded_at="2026-01-01T00:00:00+00:00",
        )
    )


@pytest.mark.parametrize(("slower", "traced"), [(4.0, True), (20.0, False)])
def test_configs_in_an_emulated_format_are_predicted_from_those_in_fp32(
    job: Job, store: Store, monkeypatch: pytest.MonkeyPatch, slower: float, traced: bool
) -> None:
    keep_probe(job, store, slower)
    wide, mixed, narrow = (complete(parse(f"method=full,precision={p}")) for p in ("fp32", "bf16-mixed", "bf16"))
    alone = complete(parse("method=lora,precision=bf16"))
    result = predictor_of(job, store, [wide, mixed, narrow, alone]).predict(lambda done, total: None).by_config
    assert set(result) == {wide, mixed, narrow, alone}, "nothing is left out"
    assert {c for c, said in result.items() if said.memory_error} == (set() if traced else {mixed, narrow})
    assert result[alone].memory_error == 0, "the same in fp32 is not among them"
    if not traced:
        assert result[wide].step_seconds is not None
        assert (
            result[mixed].step_seconds == result[narrow].step_seconds == pytest.approx(20 * result[wide].step_seconds)
        )
        assert result[narrow].device_bytes < result[mixed].device_bytes == result[wide].device_bytes
        assert result[mixed].work is None, "its trial corrects no rates"


def test_what_a_program_imports_is_as_large_in_every_format(job: Job, store: Store) -> None:
    workload = replace(job.workload, program="a user's")
    on_processor = replace(job, hardware=replace(CPU_HARDWARE, name="some-cpu"))
    keep_probe(on_processor, store, 20.0)
    configs = [complete(parse(f"method=full,precision={p}")) for p in ("fp32", "bf16")]
    alone, of_program = (
        predictor_of(of, store, configs).predict(lambda done, total: None).by_config
        for of in (on_processor, replace(on_processor, workload=workload))
    )
    for config in configs:
        assert of_program[config].device_bytes == alone[config].device_bytes + IMPORTS_BYTES


def test_what_is_kept_is_looked_up_once_and_needs_nothing_loaded(
    job: Job, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[list[Config]] = []
    looked_up: list[int] = []
    find_stored = store.estimates.find

    def counted(keys: Iterable[str]) -> Mapping[str, Mapping[str, object]]:
        looked_up.append(len(list(keys)))
        return find_stored(keys)

    predict_all(EstimateCache(job, store), CONFIGS[:1], memory_limit_bytes=GIB)
    monkeypatch.setattr(sweep, "get_ready", lambda configs, processes: traced.append(configs))
    monkeypatch.setattr(store.estimates, "find", counted)
    ahead = predictor_of(job, store, CONFIGS)
    ahead.get_ready()
    result = ahead.predict(lambda done, total: None)
    assert traced == [CONFIGS[1:]]
    assert looked_up == [len(CONFIGS)]
    assert set(result.by_config) == set(CONFIGS)
    hurried = predictor_of(job, store, CONFIGS, seconds=1.0)
    assert set(hurried.predict(lambda done, total: None).by_config) == set(CONFIGS), "what is kept takes no time"


def test_a_config_that_is_asked_for_twice_is_estimated_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded table has the winner's second run."""
    traced: list[list[Config]] = []
    monkeypatch.setattr(sweep, "sweep", lambda job, configs, **options: traced.append(configs) or {})
    predict_all(EstimateCache(job, None), [*CONFIGS, *CONFIGS], memory_limit_bytes=GIB)
    assert traced == [CONFIGS]


def test_without_time_to_estimate_what_was_estimated_before_is_of_use(job: Job, store: Store) -> None:
    predict_all(EstimateCache(job, store), CONFIGS[:1], memory_limit_bytes=GIB)
    hurried = predictor_of(job, store, CONFIGS, seconds=1.0)
    assert set(hurried.predict(lambda done, total: None).by_config) == set(CONFIGS[:1])


def test_what_cannot_be_loaded_ahead_costs_nothing_else(
    job: Job, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(configs: list[Config], processes: int) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(sweep, "get_ready", broken)
    ahead = predictor_of(job, store, CONFIGS)
    ahead.get_ready()
    assert set(ahead.predict(lambda done, total: None).by_config) == set(CONFIGS)


KNOWN = """
import sys
from autofit.prediction.estimate_cache import EstimateCache
from autofit.prediction.predict_configs import predict_all
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.estimation import site
from autofit.store import Store
from autofit.techniques import complete, parse
job = WorkloadOptions(model="smollm2-135m").job(site("h100-80g"))
config = complete(parse("method=lora,checkpointing=offload"))
with Store.open(sys.argv[1]) as store:
    found = predict_all(EstimateCache(job, store), [config], memory_limit_bytes=2**36)
print(found[config].device_bytes, found[config].seconds_to_estimate, "torch" in sys.modules)
"""


def test_known_estimates_need_no_torch(tmp_path: Path) -> None:
    job = WorkloadOptions(model="smollm2-135m").job(site("h100-80g"))
    config = complete(parse("method=lora,checkpointing=offload"))
    with Store.open(str(tmp_path / "store.db")) as store:
        new = predict_all(EstimateCache(job, store), [config], memory_limit_bytes=2**36)[config]
    command = [sys.executable, "-c", KNOWN, str(tmp_path / "store.db")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert printed == [str(new.device_bytes), str(new.seconds_to_estimate), "False"]


def test_the_server_of_estimating_processes_loads_the_libraries_and_touches_no_device() -> None:
    code = (
        "import sys, autofit.estimate.preloaded;"
        "print(*(name in sys.modules for name in ('peft', 'transformers', 'bitsandbytes')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Importing bitsandbytes touches a GPU; a build of torch for none has none to touch.
    for_cpu = torch.version.cuda is None and torch.version.hip is None
    assert done.stdout.split() == ["True", "True", str(for_cpu)]


def test_a_device_that_estimates_are_not_for_has_none(job: Job) -> None:
    amd = replace(job, hardware=replace(job.hardware, name="mi300x", capability="gfx942"))
    assert predict_all(EstimateCache(amd, None), CONFIGS, memory_limit_bytes=GIB) == {}


def test_a_single_estimate_is_looked_up_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "store.db")
    config = complete(parse("method=lora,micro_batch=2"))

    def asked(**further: Any) -> Estimate:
        return Estimation.of(OPTIONS, config, hardware="h100-80g", store=url, **further).estimate()

    made = asked()
    traced: list[Config] = []
    monkeypatch.setattr(Estimator, "trace", lambda self, of: traced.append(of))
    again = asked(memory_limit_bytes=10 * GIB)
    taken = again.seconds_to_estimate
    assert again == replace(made, memory_limit_bytes=10 * GIB, seconds_to_estimate=taken) and not traced
    with pytest.raises(AttributeError):  # an exact one is traced, which gives nothing here
        asked(exact=True)
    assert traced == [config]
