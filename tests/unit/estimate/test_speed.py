"""The time model: a roofline, fitted to a few measured trials."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from jobs import tiny_model
from tiny import CPU_HARDWARE, STACK

from autofit.catalog.hardware import cards
from autofit.estimate.amounts import MICRO_BATCH, RANK
from autofit.estimate.speed import (
    ATTENTION_FACTOR,
    BLOCKWISE_FACTOR,
    CACHED_BYTES,
    CACHED_FACTOR,
    DEQUANTISED_FACTOR,
    Rates,
    calibrated,
    features,
    guess,
    missing_figure,
    prior,
    seconds,
    step_work,
)
from autofit.estimate.update import trace_updates
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.estimate.work import Kind, Work, Works
from autofit.hardware import Hardware
from autofit.outcome import StepWork
from autofit.techniques import Job, complete, parse
from autofit.workload import Workload

PRIOR = guess(flops=1e15, wide_flops=1e14, bandwidth=3e12)


def test_an_operation_counts_by_what_bounds_it() -> None:
    product = Work(flops=10**12, moved=(10**5, 9 * 10**5), kind=Kind.PLAIN)
    wide = Work(flops=10**12, moved=(10**6,), kind=Kind.WIDE)
    copy = Work(flops=0, moved=(10**9,), kind=Kind.PLAIN)
    thin = Work(flops=10**6, moved=(10**8, 9 * 10**8), kind=Kind.PLAIN)
    works = [Works.of([product], times=3), Works.of([wide]), Works.of([copy], times=2), Works.of([thin])]
    found = step_work([part.at(1, 1) for part in works], PRIOR, moved_bytes=5)
    assert features(found).tolist() == [3e12, 1e12, 3e9, 7]
    assert (found.moved_bytes, found.estimator) == (5, ESTIMATOR_VERSION)
    assert step_work([Works.joined(works).at(1, 1)], PRIOR, moved_bytes=5) == found


def of_capability(capability: str, name: str = "rtx-a6000-48g") -> Hardware:
    return Hardware(name=name, kind="cuda", device_name="x", memory_bytes=1, capability=capability)


def test_a_card_outside_the_catalog_is_guessed_from_those_of_like_capability() -> None:
    found = prior(of_capability("8.6"))
    assert found is not None
    assert (found.relative_error, found.calibrated_on) == (1.0, 0)
    assert found.stand_in == "cards of compute capability 8.6, because rtx-a6000-48g is not in the catalog"
    alike = np.array([one.as_array() for name in ("a10g", "rtx-3090") if (one := prior(of_capability("8.6", name)))])
    assert found.as_array()[:3] == pytest.approx(np.sqrt(alike.prod(axis=0))[:3])
    newer = prior(of_capability("12.1"))
    assert newer is not None and newer.stand_in is not None and "capability 12.0," in newer.stand_in
    # AMD's capability is a name, and of a device without one nothing is known.
    assert prior(of_capability("gfx1100")) is None
    assert prior(replace(of_capability(""), capability=None)) is None


@pytest.mark.parametrize(
    ("kept", "named"),
    [({"bf16": 7e13}, "the fp32 peak (peak_flops: fp32)"),
     ({"fp32": 3.5e13}, "the 16-bit peak (peak_flops: bf16 or fp16)")],
)  # fmt: skip
def test_a_figure_that_the_catalog_lacks_is_named_and_not_replaced_in_silence(
    monkeypatch: pytest.MonkeyPatch, kept: dict[str, float], named: str
) -> None:
    lacking = tuple(replace(card, peak_flops=kept) if card.name == "a10g" else card for card in cards())
    monkeypatch.setattr("autofit.estimate.speed.cards", lambda: lacking)
    found, alike = prior(of_capability("8.6", "a10g")), prior(of_capability("8.6", "rtx-3090"))
    assert found is not None and alike is not None
    assert found.stand_in == f"cards of compute capability 8.6, because the catalog lacks {named} of a10g"
    assert found.as_array() == pytest.approx(alike.as_array())
    assert (found.relative_error, alike.stand_in) == (1.0, None)


def test_every_card_of_the_catalog_that_is_estimated_has_what_the_time_model_needs() -> None:
    assert {card.name: missing_figure(card) for card in cards() if missing_figure(card) is not None} == {}


def test_costs_grow_with_what_they_are_proportional_to() -> None:
    of_both = Work(flops=6 * MICRO_BATCH * RANK, moved=(4 * MICRO_BATCH, 8 * RANK, 16), kind=Kind.PLAIN)
    found = Works.of([of_both]).at(3, 5)
    assert (found.flops.tolist(), found.bytes.tolist()) == ([6 * 3 * 5], [4 * 3 + 8 * 5 + 16])
    assert found.repeated(7).times.tolist() == [7.0]


def test_an_accelerator_hides_the_host_and_a_processor_does_not() -> None:
    found = StepWork(flops=1e12, wide_flops=0.0, bytes=1e9, operations=100.0, moved_bytes=0.0, estimator=0)
    device = 1e12 * PRIOR.per_flop + 1e9 * PRIOR.per_byte
    host = 100 * PRIOR.per_operation
    assert seconds(found, PRIOR) == pytest.approx(max(device, host))
    assert seconds(found, replace(PRIOR, processor=True)) == pytest.approx(device + host)


def test_without_trials_the_guess_stands_and_says_so() -> None:
    assert calibrated(PRIOR, []) is PRIOR
    assert PRIOR.calibrated_on == 0 and PRIOR.relative_error == 0.5


def work(flops: float, operations: float = 0.0, *, bytes_: float = 0.0, waiting: float = 0.0) -> StepWork:
    return StepWork(
        flops=flops,
        wide_flops=0.0,
        bytes=bytes_,
        operations=operations,
        moved_bytes=0.0,
        estimator=ESTIMATOR_VERSION,
        waiting_seconds=waiting,
    )


def test_one_trial_moves_every_rate_and_claims_nothing() -> None:
    shown = work(1e15, bytes_=1e12)
    fitted = calibrated(PRIOR, [(shown, 3 * seconds(shown, PRIOR))])
    assert fitted.as_array() / PRIOR.as_array() == pytest.approx([3.0] * 4)
    assert (fitted.calibrated_on, fitted.relative_error > PRIOR.relative_error) == (1, True)


def test_the_error_is_of_trials_that_the_fit_has_not_seen() -> None:
    """Times that have nothing to do with the work are not foretold, however well four rates bend to five of them."""
    draw = random.Random(1)
    shown = [work(draw.uniform(1, 9) * 1e14, bytes_=draw.uniform(1, 9) * 1e11) for _ in range(5)]
    noise = [(one, draw.uniform(0.1, 10.0)) for one in shown]
    fitted = calibrated(PRIOR, noise)
    residual = float(np.median([abs(seconds(one, fitted) / taken - 1) for one, taken in noise]))
    assert fitted.relative_error > residual
    honest = calibrated(PRIOR, [(one, 2 * seconds(one, PRIOR)) for one in shown])
    assert honest.relative_error < 1e-6 < fitted.relative_error
    assert (
        calibrated(PRIOR, [(one, seconds(one, PRIOR)) for one in shown[:1]]).relative_error == PRIOR.relative_error / 2
    )


def test_contradictory_trials_leave_every_rate_positive() -> None:
    twice = work(1e15, bytes_=1e12)
    fitted = calibrated(PRIOR, [(twice, 0.01), (twice, 100.0), (work(1e12, 1e6), 1e-3)])
    assert np.isfinite(fitted.as_array()).all() and (fitted.as_array() > 0).all()


def test_trials_that_the_host_bounds_show_its_speed_alone() -> None:
    true = PRIOR.times(np.array([2.0, 2.0, 2.0, 6.0]))
    bound_by_host = [work(1e9, n * 1e4) for n in (1, 2, 3)]
    bound_by_device = [work(n * 1e15, 10.0, waiting=0.04) for n in (1, 2, 3)]
    shown = [(one, seconds(one, true)) for one in (*bound_by_host, *bound_by_device)]
    fitted = calibrated(PRIOR, shown)
    for one, taken in shown:
        assert seconds(one, fitted) == pytest.approx(taken, rel=0.2)


def waiting_trials(slower: float, *, compute: float = 2.0) -> list[tuple[StepWork, float]]:
    """Steps on a device that takes `compute` times the guess, and waits `slower` times as long as is guessed."""
    true = replace(PRIOR.times(np.full(4, compute)), waiting=slower)
    return [
        (one, seconds(one, true))
        for one in (work(n * 1e15, bytes_=1e12, waiting=part) for n, part in ((1, 2.0), (2, 4.0), (3, 9.0)))
    ]


STILL = [(one, 2 * seconds(one, PRIOR)) for one in (work(n * 1e15, bytes_=(4 - n) * 1e12) for n in (1, 2, 3))]
"""Trials that wait for nothing, on a device that takes twice the guess."""


def with_waiting(shown: list[tuple[StepWork, float]]) -> Rates:
    return calibrated(PRIOR, [*STILL, *shown], only_waiting=[False] * len(STILL) + [True] * len(shown))


@pytest.mark.parametrize("slower", [0.25, 1.0, 2.5])
def test_trials_that_wait_show_how_long_waiting_takes(slower: float) -> None:
    shown = waiting_trials(slower)
    fitted = with_waiting(shown)
    assert fitted.waiting == pytest.approx(slower, rel=0.1)
    for one, taken in shown:
        assert seconds(one, fitted) == pytest.approx(taken, rel=0.1)
    alone = calibrated(PRIOR, STILL)
    assert fitted.as_array() == pytest.approx(alone.as_array()), "the four rates are as without them"
    assert fitted.relative_error == alone.relative_error and fitted.calibrated_on == 6


def test_one_trial_that_waits_moves_the_guess_towards_it_and_a_wild_one_leaves_it_positive() -> None:
    (shown, taken), *_ = waiting_trials(2.0)
    assert 1.4 < with_waiting([(shown, taken)]).waiting < 2.0
    assert with_waiting([(shown, 1e-6)]).waiting > 0


def test_where_every_trial_waits_their_times_are_met_all_the_same() -> None:
    shown = waiting_trials(2.5)
    fitted = calibrated(PRIOR, shown)
    for one, taken in shown:
        assert seconds(one, fitted) == pytest.approx(taken, rel=0.2)


def test_the_stated_error_is_that_of_what_the_step_waits_for_and_of_the_rest() -> None:
    still, waiting = work(2e15), work(2e15, waiting=20.0)
    assert PRIOR.error_of(waiting) == PRIOR.error_of(still) == PRIOR.relative_error
    unseen = calibrated(PRIOR, STILL)
    assert unseen.error_of(still) < 0.01 and unseen.error_of(waiting) > 0.3, "no trial has shown how long it waits"
    seen = with_waiting(waiting_trials(1.0))
    assert seen.error_of(still) < 0.01 and seen.error_of(waiting) < 0.05
    contradictory = [
        (one, taken * factor) for (one, taken), factor in zip(waiting_trials(1.0), (0.7, 1, 2), strict=True)
    ]
    unsure = with_waiting(contradictory)
    assert unsure.error_of(still) < 0.01 and unsure.error_of(waiting) > 0.3


def test_a_processors_guess_grows_with_its_cores() -> None:
    two, four = (prior(Hardware(name="c", kind="cpu", device_name="x", memory_bytes=1, cores=n)) for n in (2, 4))
    assert two is not None and four is not None
    assert two.per_flop == 2 * four.per_flop and two.per_operation == four.per_operation
    assert two.processor and two.calibrated_on == 0 and two.relative_error > PRIOR.relative_error
    known = prior(Hardware(name="h100-80g", kind="cuda", device_name="x", memory_bytes=1))
    assert known is not None and known.per_flop < two.per_flop / 1000


def on_processor(of: Work, rates: Rates = PRIOR) -> float:
    """Seconds without what starting it takes."""
    cpu = replace(rates, processor=True)
    return seconds(step_work([Works.of([of]).at(1, 1)], cpu, moved_bytes=0), replace(cpu, per_operation=0.0))


def test_a_processor_is_slow_at_attention_and_at_what_looks_values_up() -> None:
    attention, product = (Work(flops=10**9, moved=(0,), kind=kind) for kind in (Kind.ATTENTION, Kind.WIDE))
    blockwise, dequantised, copy = (
        Work(flops=0, moved=(10**9,), kind=kind) for kind in (Kind.BLOCKWISE, Kind.DEQUANTISED, Kind.PLAIN)
    )
    assert on_processor(attention) == pytest.approx(ATTENTION_FACTOR * on_processor(product))
    assert on_processor(blockwise) == pytest.approx(BLOCKWISE_FACTOR * on_processor(copy))
    assert on_processor(dequantised) == pytest.approx(DEQUANTISED_FACTOR * on_processor(copy))
    on_card = [step_work([Works.of([of]).at(1, 1)], PRIOR, moved_bytes=0) for of in (blockwise, dequantised, copy)]
    assert on_card[0] == on_card[1] == on_card[2]


def test_a_processor_finds_small_operands_in_its_caches() -> None:
    small, large = (Work(flops=0, moved=(CACHED_BYTES + by,), kind=Kind.PLAIN) for by in (0, 64))
    assert on_processor(small) == pytest.approx(CACHED_FACTOR * on_processor(large), rel=1e-5)


def test_a_processors_product_takes_its_arithmetic_and_its_copies() -> None:
    product = Work(flops=10**12, moved=(10**9,), kind=Kind.PLAIN)
    assert on_processor(product) == pytest.approx(1e12 * PRIOR.per_flop + 1e9 * PRIOR.per_byte)


def test_a_few_trials_find_a_device_that_is_not_as_its_data_sheet() -> None:
    draw = random.Random(0)
    true = Rates(
        per_flop=2.5 * PRIOR.per_flop,
        per_wide_flop=1.5 * PRIOR.per_wide_flop,
        per_byte=0.8 * PRIOR.per_byte,
        per_operation=2 * PRIOR.per_operation,
    )

    def step() -> StepWork:
        return StepWork(
            flops=draw.uniform(1, 20) * 1e13,
            wide_flops=draw.uniform(0, 2) * 1e12,
            bytes=draw.uniform(1, 9) * 1e10,
            operations=draw.uniform(1, 9) * 1e3,
            moved_bytes=0.0,
            estimator=0,
        )

    def taken(found: StepWork) -> float:
        return seconds(found, true)

    fitted = calibrated(PRIOR, [(found, taken(found)) for found in (step() for _ in range(5))])
    assert fitted.calibrated_on == 5
    errors = [abs(seconds(f, fitted) / taken(f) - 1) for f in (step() for _ in range(50))]
    assert float(np.median(errors)) < 0.15
    before = [abs(seconds(f, PRIOR) / taken(f) - 1) for f in (step() for _ in range(50))]
    assert float(np.median(errors)) < float(np.median(before)) / 2


def test_a_processors_8_bit_update_is_known_to_be_slow() -> None:
    """bitsandbytes' update is one kernel on a device only: on a processor its quantisation is what takes long."""
    of = tiny_model(vocabulary=512, hidden=64)
    workload = Workload(model=of.name, model_digest=of.digest, seq_len=32, global_batch=1)
    job = Job(model=of, workload=workload, hardware=CPU_HARDWARE, stack=STACK)
    tapes = [
        trace_updates(complete(parse(f"method=full,optimizer={name}")), job, lambda *_: 0)
        for name in ("adamw-8bit", "adamw")
    ]
    slow, plain = ([w for place in tape.work.values() for w in place if w.kind & Kind.BLOCKWISE] for tape in tapes)
    assert slow and not plain
