"""What other hardware shows of the errors of predictions: the width of an axis value's, and the mean of memory's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from unit.operations.made_trials import HARDWARE, OLDER, WORK, fits, make_job, make_trial, out_of_memory

from autofit.lattice import Config, Lattice
from autofit.outcome import Prediction, Trial
from autofit.search.advice import Advice
from autofit.search.elsewhere import Miss, effects_factor, memory_error_by
from autofit.search.foresight import LEAST_TIME, UNKNOWN, Foresight, memory_error, time_error
from autofit.search.knowledge import Knowledge
from autofit.search.surrogate import TIME
from autofit.units import GIB

ALIKE = ("checkpointing", "loss", "optimizer", "method", "micro_batch")


def misses(
    lattice: Lattice, error: Callable[[Config], float], *, size: int = 60, workload: str = "one", noise: float = 0.03
) -> list[Miss]:
    """Of some configs, each off by `error` and by chance."""
    source = random.Random(0)
    return [
        Miss(config=c, workload_key=workload, logarithm=error(c) + source.gauss(0.0, noise))
        for c in source.sample(lattice.configs, size)
    ]


def by_values(deviation: float, seed: int = 0) -> Callable[[Config], float]:
    """Every axis value has an error of its own."""

    def error(config: Config) -> float:
        drawn = (random.Random(f"{seed} {axis} {config[axis]}").gauss(0.0, deviation) for axis in ALIKE)
        return sum(drawn)

    return error


def test_without_comparisons_nothing_is_known(lattice: Lattice) -> None:
    assert effects_factor([], TIME) == 1.0
    assert effects_factor([misses(lattice, by_values(0.0), size=1)], TIME) == 1.0
    assert time_error(1.0, 1.0) == time_error(1.0)
    assert memory_error_by([]) == memory_error(UNKNOWN)


def test_small_errors_elsewhere_are_expected_small_here(lattice: Lattice) -> None:
    found = [effects_factor([misses(lattice, by_values(d))], TIME) for d in (0.0, 0.05, 0.1, 0.3)]
    assert found == sorted(found) and found[0] < 0.55 and found[-1] > 0.85
    few, many = (effects_factor([misses(lattice, by_values(0.0), size=n)], TIME) for n in (4, 120))
    assert many < few < 1.0
    hardware = [misses(lattice, by_values(0.0, seed)) for seed in range(4)]
    assert effects_factor(hardware, TIME) < found[0]


def test_a_noisy_machine_is_no_reason_to_expect_large_effects(lattice: Lattice) -> None:
    quiet, noisy = (effects_factor([misses(lattice, by_values(0.0), noise=n)], TIME) for n in (0.03, 0.12))
    assert noisy < quiet + 0.15


def test_the_hardwares_own_factor_and_each_workloads_are_no_effects(lattice: Lattice) -> None:
    plain = misses(lattice, by_values(0.05))
    slower = [replace(miss, logarithm=miss.logarithm + 1.5) for miss in plain]
    assert effects_factor([slower], TIME) == pytest.approx(effects_factor([plain], TIME), abs=1e-6)
    other = [replace(miss, workload_key="other", logarithm=miss.logarithm - 2.0) for miss in plain]
    assert effects_factor([[*slower, *other]], TIME) < effects_factor([plain], TIME) + 0.05


def test_in_which_formats_devices_differ_no_other_device_shows(lattice: Lattice) -> None:
    def error(config: Config) -> float:
        return 1.5 if config["precision"] == "fp32" else 0.0

    factor = effects_factor([misses(lattice, error)], TIME)
    assert factor < 0.6
    found = time_error(1.0, factor)
    assert found.spread_of == TIME.spread_of and found.spread == pytest.approx(factor * TIME.spread)
    assert found.effects == {} and time_error(1.0, 0.0).spread == LEAST_TIME
    assert time_error(0.06, factor).spread == 0.06  # what is known better stays so


def test_a_search_is_as_sure_of_the_effects_as_it_was_told(lattice: Lattice) -> None:
    """Before its second trial: the first shows the device's speed."""
    said = Prediction(peak_allocated_bytes=1, device_bytes=GIB, step_seconds=1.0, calibrated_on=0, relative_error=1.0)
    predictions = dict.fromkeys(lattice.configs, said)
    widths = []
    for factor in (1.0, 0.5):
        knowledge = Knowledge(lattice, 4 * GIB)
        advice = Advice(knowledge, lambda config: 0)
        advice.foresee(Foresight(predictions=predictions, effects_factor=factor))
        knowledge.learn(make_trial(lattice.configs[0], fits(1.0, 300.0)))
        (winner,) = knowledge.points()
        widths.append(advice.regret_bound(winner))
    assert widths[1] < widths[0]


def compared(error: float, *, gib: float = 10.0, micro_batch: int = 1, name: str = "h100-80g") -> Trial:
    """A trial on a card whose memory was off by so much."""
    job = make_job(hardware=replace(HARDWARE, name=name))
    trial = make_trial({"method": "lora", "micro_batch": micro_batch}, fits(gib * (1 + error), 100.0), job=job)
    said = Prediction(
        peak_allocated_bytes=1,
        device_bytes=int(gib * GIB),
        step_seconds=None,
        calibrated_on=0,
        relative_error=None,
        work=WORK,
    )
    return replace(trial, prediction=said)


def test_many_trials_on_one_hardware_are_one_draw_of_what_they_have_in_common() -> None:
    one = [compared(0.1, micro_batch=n, gib=g) for n in (1, 2, 4) for g in (5.0, 10.0, 20.0)]
    found = memory_error_by([one])
    assert 0.0 < found.intercept < 0.03 and found.intercept_spread > 0.8 * UNKNOWN
    assert found.spread < memory_error(UNKNOWN).spread
    hardware = [[replace(t, hardware=replace(t.hardware, name=f"card-{n}")) for t in one] for n in range(8)]
    more = memory_error_by(hardware)
    assert more.intercept > 2 * found.intercept and more.intercept_spread < found.intercept_spread


def test_formulas_failures_and_other_versions_show_nothing_of_memorys_effects() -> None:
    trial = compared(0.1)
    assert trial.prediction is not None
    silent = [
        replace(trial, prediction=None),
        replace(trial, prediction=replace(trial.prediction, memory_error=0.3)),
        replace(trial, prediction=replace(trial.prediction, work=OLDER)),
        replace(trial, outcome=out_of_memory()),
    ]
    assert memory_error_by([silent]).spread == memory_error(UNKNOWN).spread
