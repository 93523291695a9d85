"""Predictions from a probe: in place of the guess, on the same hardware and stack alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from unit.operations.made_trials import HARDWARE, MODEL, STACK, WORK, fits, make_job, make_prediction, make_trial

from autofit.catalog.models import Model, load
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import (
    BETWEEN_RANKS,
    COLLECTIVES,
    OUT_OF_TIME,
    PROBE_VERSION,
    UPDATE_ON_HOST,
    WAYS,
    MeasuredStep,
    Probe,
    ProbePart,
    collective,
    shapes_key,
    transfer,
)
from autofit.core.device.probe_findings import findings
from autofit.core.device.state import DeviceState, ProcessorState
from autofit.core.device.work_kinds import DISK_READ, HOST_LINK, HOST_UPDATE, KINDS, LAYOUTS, LINK, product
from autofit.core.outcome import TimedOut
from autofit.core.prediction import StepWork
from autofit.estimate.time.fitted_rates import calibrated
from autofit.estimate.time.guessed_rates import prior
from autofit.estimate.time.roofline import Rates, seconds
from autofit.estimate.time.transfers import seconds_per_byte
from autofit.prediction.calibration import rates_for
from autofit.prediction.probing import make_sure, probed, rates_of, stored_probe
from autofit.store import Store
from autofit.trial.machine import device_lock
from autofit.trial.machine.device_lock import GivenUp

OWN, ANOTHER = load(MODEL), load("smollm2-360m")
DIGEST = OWN.digest


def guess() -> Rates:
    result = prior(HARDWARE)
    assert result is not None
    return result


def made_probe(slower: float = 3.0, **changes: object) -> Probe:
    """A probe of a device whose every rate is so many times the guess."""
    rates = {kind: slower * rate for kind, rate in zip(KINDS, guess().seconds_per, strict=True)}
    result = Probe(
        hardware=HARDWARE,
        stack=STACK,
        model=MODEL,
        shapes_key=shapes_key(DIGEST),
        parts=(ProbePart(name="all", seconds=1.0, seconds_per=rates),),
        steps=(),
        seconds=9.0,
        recorded_at="2026-01-01T00:00:00+00:00",
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def measured_step(taken: float, estimator: int = WORK.estimator) -> MeasuredStep:
    work = replace(WORK, estimator=estimator)
    return MeasuredStep(config={}, layers=2, seconds=taken, work=work)


def test_what_was_measured_replaces_the_guess_and_the_rest_stays() -> None:
    part = ProbePart(name="products", seconds=1.0, seconds_per={"product/bf16/nt": 7.0})
    result = rates_of(made_probe(parts=(part,)), guess())
    assert result.per("product/bf16/nt") == 7.0 and result.per("launch") == guess().per("launch")
    assert (result.calibrated_on, result.relative_error) == (0, 0.3)


def test_a_real_step_scales_the_rates_and_says_how_sure_they_are() -> None:
    predicted = seconds(WORK, rates_of(made_probe(), guess()))
    right = rates_of(made_probe(steps=(measured_step(predicted),)), guess())
    wrong = rates_of(made_probe(steps=(measured_step(2 * predicted),)), guess())
    assert seconds(WORK, right) == pytest.approx(predicted) and right.relative_error == 0.1
    assert seconds(WORK, wrong) == pytest.approx(2 * predicted) and wrong.relative_error > 2 * 0.1
    assert right.calibrated_on == wrong.calibrated_on == 0, "a few layers are no trial"
    other = rates_of(made_probe(steps=(measured_step(2 * predicted, estimator=1),)), guess())
    assert seconds(WORK, other) == pytest.approx(predicted), "another version counted its work in another way"


def test_layers_and_the_rest_are_scaled_apart() -> None:
    """A device whose products are three times slower within a step than alone, while the head's are as predicted."""
    kind, head = "product/bf16/nt", "product/bf16/nt/wide"
    alone = rates_of(made_probe(), guess())

    def step(layers: int) -> MeasuredStep:
        amounts = {kind: layers * 1.0 / alone.per(kind), head: 4.0 / alone.per(head)}
        work = StepWork(amounts=amounts, estimator=WORK.estimator)
        return MeasuredStep(config={}, layers=layers, seconds=layers * 3.0 + 4.0, work=work)

    result = rates_of(made_probe(steps=(step(4), step(2))), guess())
    whole = step(30)
    assert whole.work is not None and seconds(whole.work, result) == pytest.approx(whole.seconds, rel=0.15)
    assert seconds(whole.work, alone) < 0.4 * whole.seconds
    noisy = replace(step(4), seconds=step(2).seconds)
    together = rates_of(made_probe(steps=(noisy, step(2))), guess())
    assert noisy.work is not None and seconds(noisy.work, together) == pytest.approx(noisy.seconds, rel=0.3)


def test_steps_of_which_one_waits_for_launches_are_taken_whole() -> None:
    """The seconds of an H100 with qwen2.5-0.5b. With two layers the launches hide behind the head's products, with
    eight they do not: what six layers add is less than their launches take."""
    kind = "product/bf16/nt"
    alone = rates_of(made_probe(), guess())

    def step(layers: int, taken: float, launching: float, computing: float) -> MeasuredStep:
        amounts = {"launch": launching / alone.per("launch"), kind: computing / alone.per(kind)}
        work = StepWork(amounts=amounts, estimator=WORK.estimator)
        return MeasuredStep(config={}, layers=layers, seconds=taken, work=work)

    few, many = step(2, 0.0234, 0.0098, 0.0231), step(8, 0.0386, 0.0336, 0.0331)
    result = rates_of(made_probe(steps=(many, few)), guess())
    assert 1.0 <= result.per("launch") / alone.per("launch") < 1.2, "the difference alone would make it 0.65"
    for one in (few, many):
        assert one.work is not None and seconds(one.work, result) == pytest.approx(one.seconds, rel=0.1)


def test_what_is_waited_for_takes_as_long_as_transfers_were_measured_to(store: Store) -> None:
    """A card behind a link with a quarter of its data sheet's bandwidth, one way; links between cards, and updates on
    the host, are as fast as they were measured, and disks as guessed."""
    sheet = seconds_per_byte(HARDWARE)
    host = 1.0 / sheet[HOST_LINK]
    figures = {transfer(WAYS[0]): host / 4, transfer(WAYS[1]): host}
    figures |= {collective("reduction"): 5e9, collective("gather"): 4e9, UPDATE_ON_HOST: 20e9}
    figures |= {"flash attention in bf16, FLOP per second": 4e14}  # as probes of this version once measured
    result = made_probe(parts=(ProbePart(name="transfers", seconds=1.0, figures=figures),))
    waiting = replace(WORK, waits={HOST_LINK: 2.0 * host})
    rates = rates_of(result, guess())
    assert seconds(waiting, rates) == pytest.approx(seconds(WORK, guess()) + 8.0)
    trial = seconds(WORK, guess()) + 8.0
    assert calibrated(rates, [(waiting, trial)]).waiting == pytest.approx(1.0, rel=0.01), "a trial confirms it"
    assert (rates.transfers[LINK], rates.transfers[HOST_UPDATE]) == (1 / 4e9, 1 / 20e9)
    assert rates.transfers[DISK_READ] == sheet[DISK_READ]
    sentences = [sentence for sentence in findings(result) if sentence.startswith("Transfers")]
    assert sentences[0] == f"Transfers to the device, pinned: {host / 4e9:.3g} GB/s."


def test_rates_are_the_stored_probes_of_this_very_device(store: Store) -> None:
    store.probes.keep(made_probe(slower=3.0))

    def factor(hardware: Hardware = HARDWARE, stack: Stack = STACK, model: Model = OWN) -> float:
        result = rates_for(replace(make_job(hardware=hardware, stack=stack), model=model), store)
        assert result is not None
        return seconds(WORK, result) / seconds(WORK, guess())

    assert factor() == pytest.approx(3.0)
    assert factor(model=ANOTHER) == pytest.approx(3.0), "better than the guess"
    assert factor(stack=replace(STACK, torch="2.99.0")) == pytest.approx(1.0)
    assert factor(hardware=replace(HARDWARE, device_name="another")) == pytest.approx(1.0)


def test_rates_at_other_shapes_are_less_sure(store: Store) -> None:
    store.probes.keep(made_probe())
    own, other = (rates_for(replace(make_job(), model=model), store) for model in (OWN, ANOTHER))
    assert own is not None and other is not None and other.relative_error > own.relative_error


def test_a_stored_probe_is_not_measured_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[float] = []

    def run(*given: object, **asked: object) -> Probe:
        runs.append(1.0)
        return made_probe(slower=2.0 + len(runs))

    monkeypatch.setattr("autofit.probe.run.run", run)
    model = load(MODEL)
    first, measured = probed(model, HARDWARE, STACK, store)
    assert measured and probed(model, HARDWARE, STACK, store) == (first, False)
    again, measured = probed(model, HARDWARE, STACK, store, fresh=True)
    assert measured and again != first and probed(model, HARDWARE, STACK, store) == (again, False)


def test_a_probe_of_a_busy_device_is_made_again_now_and_by_the_next_search(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = ProcessorState(cores=2, threads=2, busy_seconds=20.0, own_seconds=10.0, stolen_seconds=0.0)
    here = replace(HARDWARE, kind="cpu", cores=2)
    quiet = made_probe(hardware=here)
    disturbed = replace(quiet, device_state=DeviceState(seconds=10.0, processor=busy))
    assert disturbed.doubts == ("other processes took 50% of its cores",)
    made = [disturbed, disturbed, quiet]
    monkeypatch.setattr("autofit.probe.run.run", lambda *given, **asked: made.pop(0))
    model = load(MODEL)
    first, measured = probed(model, here, STACK, store)
    assert measured and first.doubts and len(made) == 1
    assert findings(first)[0].startswith("The device was not free: other processes took 50%")
    assert rates_of(first, guess()).relative_error > rates_of(quiet, guess()).relative_error
    second, measured = probed(model, here, STACK, store)
    assert measured and not second.doubts and not made
    assert probed(model, here, STACK, store) == (second, False)
    made += [disturbed] * 3
    probed(model, here, STACK, store, fresh=True)
    assert len(made) == 1, "two attempts"
    probed(model, here, STACK, store)
    assert not made, "of a machine that may always be busy there is one more"


@pytest.mark.parametrize(("slower", "believed"), [(1.0, True), (1.6, True), (3.0, False), (0.3, False)])
def test_a_probe_that_trials_contradict_is_made_again_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, slower: float, believed: bool
) -> None:
    old, model = made_probe(), load(MODEL)
    store.probes.keep(old)
    taken = slower * seconds(WORK, rates_of(old, guess()))
    fitting = fits(1.0, 512 / taken)
    prediction = make_prediction(seconds=taken)
    for minute, micro_batch in enumerate((1, 2)):
        trial = make_trial({"micro_batch": micro_batch}, fitting)
        store.add(replace(trial, prediction=prediction, recorded_at=f"2026-01-02T00:0{minute}:00+00:00"))
    anew = made_probe(recorded_at="2026-01-03T00:00:00+00:00")
    monkeypatch.setattr("autofit.probe.run.run", lambda *given, **asked: anew)
    assert probed(model, HARDWARE, STACK, store) == ((old, False) if believed else (anew, True))
    assert not probed(model, HARDWARE, STACK, store)[1], "trials before it say nothing of it"


@pytest.mark.parametrize(("slower", "believed"), [(4.0, True), (6.0, False)])
def test_a_cut_trial_contradicts_a_probe_by_the_least_that_it_takes(
    store: Store, monkeypatch: pytest.MonkeyPatch, slower: float, believed: bool
) -> None:
    old, anew = made_probe(), made_probe(recorded_at="2026-01-03T00:00:00+00:00")
    store.probes.keep(old)
    taken = seconds(WORK, rates_of(old, guess()))
    prediction = make_prediction(seconds=taken)
    for number, outcome in enumerate(
        (
            fits(1.0, 512 / taken),
            fits(1.0, 512 / taken),
            TimedOut(reason="slow", deadline_seconds=60.0, least_step_seconds=slower * taken),
        ),
        start=1,
    ):
        trial = make_trial({"micro_batch": number}, outcome)
        store.add(replace(trial, prediction=prediction, recorded_at="2026-01-02T00:00:00+00:00"))
    monkeypatch.setattr("autofit.probe.run.run", lambda *given, **asked: anew)
    assert probed(load(MODEL), HARDWARE, STACK, store) == ((old, False) if believed else (anew, True))


@pytest.mark.parametrize(
    "other",
    [
        {"power_limit_watts": 300.0},
        {"name": "h100-80g-1g.10gb", "mig_profile": "1g.10gb"},
        {"instructions": "avx2", "kind": "cpu"},
    ],
)
def test_a_probe_under_another_power_limit_or_of_another_part_of_a_card_is_not_used(
    store: Store, other: dict[str, object]
) -> None:
    here = replace(HARDWARE, **other)  # type: ignore[arg-type]
    store.probes.keep(made_probe())
    assert stored_probe(here, STACK, store, DIGEST) is None
    assert stored_probe(HARDWARE, replace(STACK, torch="2.99.0"), store, DIGEST) is None
    store.probes.keep(made_probe(hardware=here))
    result = stored_probe(here, STACK, store, DIGEST)
    assert result is not None and result.hardware == here


def test_a_probe_waits_for_its_device_and_takes_of_it_no_longer_than_a_search_can_spare(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    granted: list[object] = []

    def run(*given: object, most_seconds: float, **asked: object) -> Probe:
        granted.append(most_seconds)
        return made_probe()

    @contextmanager
    def taken(devices: object, *, waiting: object, most_seconds: float) -> Iterator[float]:
        granted.append(most_seconds)
        raise GivenUp("another autofit process used the device for all of 60 s")
        yield

    monkeypatch.setattr("autofit.probe.run.run", run)
    for budget, most in ((900.0, 90.0), (60.0, 30.0), (None, math.inf)):
        with Store.open(str(tmp_path / f"{budget}.db")) as fresh:
            make_sure(make_job(), fresh, budget_seconds=budget)
        assert granted.pop() == pytest.approx(most, rel=0.1)
    monkeypatch.setattr(device_lock, "held", taken)
    make_sure(make_job(), store, budget_seconds=600.0)
    assert granted == [60.0] and "another autofit process used the device" in caplog.text


def test_a_probe_of_another_version_is_not_used(store: Store) -> None:
    store.probes.keep(made_probe(version=PROBE_VERSION - 1))
    assert stored_probe(HARDWARE, STACK, store, DIGEST) is None
    assert stored_probe(HARDWARE, STACK, store, "another model") is None
    without = made_probe().to_json()
    del without["version"]
    assert Probe.from_json(without).version == 0, "those before versions were kept"


@pytest.mark.parametrize("full", ["OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", OUT_OF_TIME])
def test_what_ran_out_of_memory_or_time_is_measured_again_by_the_next_search(
    store: Store, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """Another process may have held the device for a while; what a kernel lacks, it will lack again."""
    lacking = ProbePart(name="attention in fp16", seconds=1.0, failure="RuntimeError: not implemented")
    parts = (*made_probe().parts, lacking)
    anew = ProbePart(name="real step", seconds=2.0)
    runs: list[object] = []

    def run(*given: object, known: Probe, parts: tuple[str, ...], **asked_for: object) -> Probe:
        runs.append((known, parts))
        return made_probe(parts=(anew,), steps=(measured_step(3.0),), recorded_at="2026-01-02T00:00:00+00:00")

    monkeypatch.setattr("autofit.probe.run.run", run)
    short = made_probe(parts=(*parts, ProbePart(name="real step", seconds=0.1, failure=full)))
    store.probes.keep(short)
    model = load(MODEL)
    result, measured = probed(model, HARDWARE, STACK, store)
    assert measured and runs == [(short, ("real step",))]
    assert result.parts == (*parts, anew) and [step.seconds for step in result.steps] == [3.0]
    assert probed(model, HARDWARE, STACK, store) == (result, False)


def test_what_happens_between_ranks_is_measured_once_there_are_several(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    between = ProbePart(name=BETWEEN_RANKS, seconds=2.0, figures={collective(name): 1e9 for name in COLLECTIVES})
    measured_parts: list[tuple[str, ...]] = []

    def run(*given: object, known: Probe, parts: tuple[str, ...], **asked_for: object) -> Probe:
        measured_parts.append(parts)
        return made_probe(parts=(between,))

    monkeypatch.setattr("autofit.probe.run.run", run)
    store.probes.keep(made_probe())
    model = load(MODEL)
    assert not probed(model, HARDWARE, STACK, store)[1]
    result, measured = probed(model, HARDWARE, STACK, store, ranks=2)
    assert measured and measured_parts == [(BETWEEN_RANKS,)] and result.parts == (*made_probe().parts, between)
    assert not probed(model, HARDWARE, STACK, store, ranks=4)[1]


def test_a_figure_of_a_later_version_is_shown_as_it_is() -> None:
    parts = (ProbePart(name="power", seconds=1.0, figures={"power limit, watts": 450.0}),)
    assert findings(made_probe(parts=parts)) == ["Power limit, watts: 450."]


@pytest.mark.parametrize(
    ("ratio", "said"),
    [(90.0, "bf16 is 90 times slower than fp32 here."), (0.2, "bf16 is 5.0 times faster than fp32."),
     (1.1, "bf16 is about as fast as fp32.")],
)  # fmt: skip
def test_what_a_format_is_worth_is_said_in_one_sentence(ratio: float, said: str) -> None:
    slower = {"fp32": 1.0, "bf16": ratio}
    rates = {product(f, layout): 1e-11 * by for f, by in slower.items() for layout in LAYOUTS}
    failed = ProbePart(name="attention in fp16", seconds=1.0, failure="RuntimeError: not implemented")
    parts = (ProbePart(name="products", seconds=1.0, seconds_per=rates), failed)
    sentences = findings(made_probe(parts=parts))
    assert sentences == [said, "Not measured: attention in fp16 (RuntimeError: not implemented)."]
