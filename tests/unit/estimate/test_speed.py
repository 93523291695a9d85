"""The time model: a roofline, fitted to a few measured trials."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from jobs import tiny_model
from tiny import CPU_HARDWARE, STACK

from autofit.catalog import hardware as catalog
from autofit.catalog.hardware import cards
from autofit.core.device.hardware import Hardware
from autofit.core.device.work_kinds import HOST_LINK, KINDS, LAUNCH, LINK, product
from autofit.core.prediction import StepWork
from autofit.core.workload import Workload
from autofit.estimate.kernels.scratch import Held
from autofit.estimate.memory.symbolic_sizes import MICRO_BATCH, RANK
from autofit.estimate.time import guessed_rates
from autofit.estimate.time.fitted_rates import calibrated
from autofit.estimate.time.guessed_rates import guess, missing_figure, prior
from autofit.estimate.time.op_costs import Costs, Kinds, Work, Works
from autofit.estimate.time.roofline import (
    FAR_BYTES,
    FRESH_BYTES,
    NEAR_BYTES,
    Rates,
    micro_step_seconds,
    seconds,
    step_work,
)
from autofit.estimate.tracing.update import trace_updates
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.techniques import Job, complete, parse

PRIOR = replace(guess(flops=1e15, wide_flops=1e14, bandwidth=3e12), transfers={HOST_LINK: 1.0})
"""A byte to the host takes a second, so that a test's bytes are seconds."""
NARROW, WIDE, FAR = "product/bf16/nt", "product/fp32/nt", "elementwise/bf16/far"


OF_PRODUCT, OF_FP32, OF_COPY, OF_UPDATE = (
    Kinds("product/bf16/nt", "operands/bf16/nt", "operands/bf16/nt", "called/bf16"),
    Kinds("product/fp32/nt", "operands/fp32/nt", "operands/fp32/nt", "called/fp32"),
    Kinds(LAUNCH, "elementwise/bf16/near", "elementwise/bf16/far"),
    Kinds(LAUNCH, "update/bf16", "update/bf16"),
)


def one(kinds: Kinds, *, flops: int = 0, moved: int = 0, made: int = 0) -> Work:
    return Work(flops=flops, moved=(moved,), kinds=kinds, made=made)


def costs(*works: Work, times: float = 1) -> Costs:
    return Works.of(works, times).at(1, 1)


NOTHING = costs()


def slower(**factors: float) -> Rates:
    """PRIOR, with the rates of the kinds that begin with a name multiplied."""
    ratios = [next((by for name, by in factors.items() if kind.startswith(name)), 1.0) for kind in KINDS]
    return PRIOR.times(np.array(ratios))


def test_on_an_accelerator_an_operation_counts_by_what_bounds_it() -> None:
    thrice = costs(one(OF_PRODUCT, flops=10**12, moved=10**6), times=3)
    wide = costs(one(OF_FP32, flops=10**12, moved=10**6))
    copies = costs(one(OF_COPY, moved=10**9), times=2)
    thin = costs(one(OF_PRODUCT, flops=10**6, moved=10**9))
    found = step_work([thrice, wide, copies], thin, PRIOR, transfers=({LINK: 3.0}, {HOST_LINK: 5.0}))
    bytes_ = {"elementwise/bf16/far": 2e9, "operands/bf16/nt": 1e9}
    assert found.amounts == {NARROW: 3e12, WIDE: 1e12, **bytes_, LAUNCH: 7.0}
    assert found.update == {"operands/bf16/nt": 1e9, LAUNCH: 1.0}
    assert (found.beside, found.waits, found.estimator) == ({LINK: 3.0}, {HOST_LINK: 5.0}, ESTIMATOR_VERSION)


def test_a_processors_operation_takes_its_arithmetic_its_bytes_and_its_new_pages() -> None:
    cpu = replace(PRIOR, processor=True)
    made = 2 * FRESH_BYTES
    found = step_work([costs(one(OF_PRODUCT, flops=10**12, moved=10**6, made=made))], NOTHING, cpu)
    assert found.amounts == {NARROW: 1e12, "operands/bf16/nt": 1e6, "called/bf16": 1.0, "fresh": made, LAUNCH: 1.0}
    taken = sum(amount * cpu.per(kind) for kind, amount in found.amounts.items())
    assert seconds(found, cpu) == pytest.approx(taken)


@pytest.mark.parametrize(("moved", "near"), [(1, 1.0), (NEAR_BYTES, 1.0), (16 * 1024**2, 0.5), (2 * FAR_BYTES, 0.0)])
def test_the_fewer_bytes_move_the_more_are_found_in_the_caches(moved: int, near: float) -> None:
    found = step_work([costs(one(OF_COPY, moved=moved))], NOTHING, PRIOR)
    assert found.amounts.get("elementwise/bf16/near", 0.0) == pytest.approx(near * moved)
    assert found.amounts.get(FAR, 0.0) == pytest.approx((1 - near) * moved)


def test_a_micro_step_is_what_the_update_leaves() -> None:
    steps, update = costs(one(OF_PRODUCT, flops=10**15), times=4), costs(one(OF_UPDATE, moved=10**12))
    found = step_work([steps], update, PRIOR)
    assert micro_step_seconds(found, PRIOR, 4) == pytest.approx(1e15 * PRIOR.per(NARROW))


def test_a_card_that_emulates_bf16_is_no_faster_with_it_than_in_fp32() -> None:
    found = guess(flops=1e15, wide_flops=1e14, bandwidth=3e12, emulates_bf16=True)
    assert found.per("product/bf16/nt") == found.per("product/fp32/nt") == 10 * found.per("product/fp16/nt")


def of_capability(capability: str, name: str = "rtx-a6000-48g") -> Hardware:
    return Hardware(name=name, kind="cuda", device_name="x", memory_bytes=1, capability=capability)


def test_a_card_outside_the_catalog_is_guessed_from_those_of_like_capability() -> None:
    found = prior(of_capability("8.6"))
    assert found is not None
    assert (found.relative_error, found.calibrated_on) == (1.0, 0)
    assert found.stand_in == "cards of compute capability 8.6, because rtx-a6000-48g is not in the catalog"
    alike = np.array([one.as_array() for name in ("a10g", "rtx-3090") if (one := prior(of_capability("8.6", name)))])
    assert found.as_array() == pytest.approx(np.sqrt(alike.prod(axis=0)))
    newer = prior(of_capability("12.1"))
    assert newer is not None and newer.stand_in is not None and "capability 12.0," in newer.stand_in
    (whole, slice_) = (prior(replace(of_capability("9.0"), mig_profile=profile)) for profile in (None, "1c.2g.20gb"))
    assert whole is not None and slice_ is not None
    assert slice_.per(NARROW) == pytest.approx(3.5 * whole.per(NARROW))
    a30 = replace(of_capability("8.0"), device_name="NVIDIA A30 MIG 1g.6gb", mig_profile="1g.6gb")
    assert a30.share_of_card == 0.25
    pascal = prior(of_capability("6.1"))
    assert pascal is not None and pascal.per(NARROW) == pascal.per(product("fp32", "nt"))
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
    for place in (catalog, guessed_rates):
        monkeypatch.setattr(place, "cards", lambda: lacking)
    found, alike = prior(of_capability("8.6", "a10g")), prior(of_capability("8.6", "rtx-3090"))
    assert found is not None and alike is not None
    assert found.stand_in == f"cards of compute capability 8.6, because the catalog lacks {named} of a10g"
    assert found.as_array() == pytest.approx(alike.as_array())
    assert (found.relative_error, alike.stand_in) == (1.0, None)


def test_every_card_of_the_catalog_that_is_estimated_has_what_the_time_model_needs() -> None:
    assert {card.name: missing_figure(card) for card in cards() if missing_figure(card) is not None} == {}


def test_costs_grow_with_what_they_are_proportional_to() -> None:
    both = 4 * MICRO_BATCH * RANK
    found = Works.of(
        [Work(flops=6 * MICRO_BATCH * RANK, moved=(4 * MICRO_BATCH, 8 * RANK, 16), kinds=OF_COPY, made=both)]
    )
    at = found.at(3, 5)
    assert (at.flops.tolist(), at.bytes.tolist()) == ([6 * 3 * 5], [4 * 3 + 8 * 5 + 16])
    assert (at.made.tolist(), at.repeated(7).times.tolist()) == ([4 * 3 * 5], [7.0])


def test_an_accelerator_hides_the_host_and_a_processor_does_not() -> None:
    found = work(1e12, 100.0, bytes_=1e9)
    device = 1e12 * PRIOR.per(NARROW) + 1e9 * PRIOR.per(FAR)
    host = 100 * PRIOR.per(LAUNCH)
    assert seconds(found, PRIOR) == pytest.approx(max(device, host))
    assert seconds(found, replace(PRIOR, processor=True)) == pytest.approx(device + host)


def test_without_trials_the_guess_stands_and_says_so() -> None:
    assert calibrated(PRIOR, []) is PRIOR
    assert PRIOR.calibrated_on == 0 and PRIOR.relative_error == 0.5


def work(flops: float, operations: float = 0.0, *, bytes_: float = 0.0, waiting: float = 0.0) -> StepWork:
    amounts = {NARROW: flops, FAR: bytes_, LAUNCH: operations}
    return StepWork(amounts=amounts, estimator=ESTIMATOR_VERSION, waits={HOST_LINK: waiting} if waiting else {})


def test_one_trial_moves_every_rate_and_claims_nothing() -> None:
    shown = work(1e15, bytes_=1e12)
    fitted = calibrated(PRIOR, [(shown, 3 * seconds(shown, PRIOR))])
    assert fitted.as_array() / PRIOR.as_array() == pytest.approx(3.0)
    assert (fitted.calibrated_on, fitted.relative_error > PRIOR.relative_error) == (1, True)


def test_the_error_is_of_trials_that_the_fit_has_not_seen() -> None:
    """Times that have nothing to do with the work are not predicted, however well the rates bend to five of them."""
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
    true = slower(launch=6.0, product=2.0, elementwise=2.0)
    bound_by_host = [work(1e9, n * 1e4) for n in (1, 2, 3)]
    bound_by_device = [work(n * 1e15, 10.0, waiting=0.04) for n in (1, 2, 3)]
    shown = [(one, seconds(one, true)) for one in (*bound_by_host, *bound_by_device)]
    fitted = calibrated(PRIOR, shown)
    for one, taken in shown:
        assert seconds(one, fitted) == pytest.approx(taken, rel=0.2)


def waiting_trials(slower: float, *, compute: float = 2.0) -> list[tuple[StepWork, float]]:
    """Steps on a device that takes `compute` times the guess, and waits `slower` times as long as is guessed."""
    true = replace(PRIOR.times(np.full(len(KINDS), compute)), waiting=slower)
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
    assert fitted.as_array() == pytest.approx(alone.as_array()), "the rates are as without them"
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
    assert two.per(NARROW) == 2 * four.per(NARROW) and two.per(LAUNCH) == four.per(LAUNCH)
    assert two.processor and two.calibrated_on == 0 and two.relative_error > PRIOR.relative_error
    known = prior(Hardware(name="h100-80g", kind="cuda", device_name="x", memory_bytes=1))
    assert known is not None and known.per(NARROW) < two.per(NARROW) / 1000


@pytest.mark.parametrize(
    ("instructions", "formats"),
    [
        ("sse41", ["fp32", "bf16", "fp16"]),
        ("avx2", ["fp32", "bf16", "fp16"]),
        ("avx512", ["fp32", "bf16", "fp16"]),
        ("avx512-bf16-aten-avx2", ["bf16", "fp32", "fp16"]),
        ("amx", ["bf16", "fp16", "fp32"]),
        ("avx512-fp16", ["bf16", "fp16", "fp32"]),
        ("asimd", ["fp16", "fp32", "bf16"]),
        ("asimd-sve-bf16", ["bf16", "fp16", "fp32"]),
    ],
)
def test_a_format_that_a_processor_only_emulates_is_not_taken_for_a_fast_one(
    instructions: str, formats: list[str]
) -> None:
    processor = Hardware(name="c", kind="cpu", device_name="x", memory_bytes=1, cores=2)
    found = prior(replace(processor, instructions=instructions))
    assert found is not None
    speeds = {name: 1.0 / found.per(product(name, "nt")) for name in formats}
    assert sorted(formats, key=lambda name: -speeds[name]) == formats, speeds


def test_intels_bf16_without_tiles_is_no_faster_than_fp32() -> None:
    processor = Hardware(name="c", kind="cpu", device_name="Intel(R) Xeon(R)", memory_bytes=1, cores=2)
    found = prior(replace(processor, instructions="avx512-fp16"))
    assert found is not None
    assert found.per(product("bf16", "nt")) == 2 * found.per(product("fp32", "nt"))


def test_a_few_trials_find_a_device_that_is_not_as_its_data_sheet() -> None:
    draw = random.Random(0)
    true = slower(**{"product/bf16": 2.5, "product/fp32": 1.5, "elementwise": 0.8, "launch": 2.0})

    def step() -> StepWork:
        amounts = {
            NARROW: draw.uniform(1, 20) * 1e13,
            WIDE: draw.uniform(0, 2) * 1e12,
            FAR: draw.uniform(1, 9) * 1e10,
            LAUNCH: draw.uniform(1, 9) * 1e3,
        }
        return StepWork(amounts=amounts, estimator=0)

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
    traces = [
        trace_updates(complete(parse(f"method=full,optimizer={name}")), job, lambda *_: Held())
        for name in ("adamw-8bit", "adamw")
    ]
    slow, plain = (
        [w for place in trace.work.values() for w in place if w.kinds.near == "quantise-8bit"] for trace in traces
    )
    assert slow and not plain
