"""The belief about step times: what one surprising trial moves, and that whatever it moves stays honest."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from unit.operations.made_trials import fits, make_job, make_trial
from unit.search.made_truth import cpu_lattice, plan_of, predicted

from autofit.core.lattice import Config, Lattice
from autofit.core.outcome import TimedOut
from autofit.core.units import GIB
from autofit.core.workload import Goal
from autofit.prediction.predictions import Predictions
from autofit.search.acquisition.acquisition import LARGE_GAIN, Acquisition
from autofit.search.acquisition.gains import Front, expected_gain
from autofit.search.acquisition.step_times import Mixture, StepTimes, TimeObservation, time_error
from autofit.search.acquisition.surrogate import LogNormal
from autofit.search.lattice_state import LatticeState

LATTICE = cpu_lattice(make_job())
FULL = [config for config in LATTICE.configs if config["method"] == "full"]
PLAIN = next(config for config in FULL if config["precision"] == "fp32" and config["checkpointing"] == "full")
TIMING = 0.01
"""Standard deviation of the logarithm of each shown step time."""


def measured(config: Config, factor: float) -> TimeObservation:
    """A trial that took so many times what was predicted: 1 s for every config."""
    return TimeObservation(config, math.log(factor), TIMING)


def belief(trials: Sequence[TimeObservation], lattice: Lattice = LATTICE) -> Mixture:
    """About every config of the lattice, on a device whose speed is known to within a factor of 2."""
    times = StepTimes(lattice, time_error(1.0), dict.fromkeys(lattice.configs, 0.0))
    return times.predict(trials, np.arange(len(lattice.configs)))


def expected(mixture: Mixture, which: Callable[[Config], bool]) -> list[float]:
    """Times what was predicted, of some configs."""
    return [
        math.exp(mean) for config, mean in zip(LATTICE.configs, mixture.together.mean, strict=True) if which(config)
    ]


def sample(size: int, seed: int = 0) -> list[Config]:
    return random.Random(seed).sample(LATTICE.configs, size)


def test_a_surprising_trial_moves_its_own_value_and_leaves_the_others_alone() -> None:
    """The same config was as fast as predicted in the other formats."""
    trials = [measured(PLAIN, 1.0), measured(PLAIN.replace(precision="bf16-mixed"), 1.0)]
    mixture = belief([*trials, measured(PLAIN.replace(precision="bf16"), 30.0)])
    assert min(expected(mixture, lambda c: c["precision"] == "bf16")) > 10.0
    assert max(expected(mixture, lambda c: c["precision"] != "bf16")) < 1.5


def test_after_one_slow_trial_what_shares_least_with_it_may_gain_much() -> None:
    """Nothing but a trial in bf16 has run, and took 90 times what was predicted: an untried format is worth a trial."""
    first = PLAIN.replace(precision="bf16")
    front, mixture = Front.of([(1.0 * GIB, 90.0)]), belief([measured(first, 90.0)])
    count = len(LATTICE.configs)
    gain = expected_gain(
        front, mixture, np.full(count, -math.inf), np.full(count, 1.0 * GIB), 2.0 * GIB, area_weight=0.0
    )
    of_config = dict(zip(LATTICE.configs, gain.tolist(), strict=True))
    assert of_config[PLAIN] > 5 * LARGE_GAIN
    assert of_config[first] < of_config[PLAIN] / 5


def test_two_causes_are_found_from_trials() -> None:
    """Each of its own factor; a config that has both is as slow as both together."""

    def truth(config: Config) -> float:
        return (30.0 if config["precision"] == "bf16" else 1.0) * (8.0 if config["loss"] == "chunked" else 1.0)

    trials = sample(24)
    mixture = belief([measured(config, truth(config)) for config in trials])
    untried = set(LATTICE.configs) - set(trials)
    off = [
        abs(mean - math.log(truth(config)))
        for config, mean in zip(LATTICE.configs, mixture.together.mean, strict=True)
        if config in untried
    ]
    assert {truth(config) for config in untried} == {1.0, 8.0, 30.0, 240.0}
    assert max(off) < math.log(1.5)


def test_a_bound_moves_the_belief_only_above_what_was_expected() -> None:
    """Of a trial that was cut: a config takes at least so long."""
    by_config = dict.fromkeys(LATTICE.configs, predicted(GIB, error=1.0))
    cut = PLAIN.replace(precision="bf16")

    def seconds(least: float | None) -> dict[str, float]:
        """Expected of the trial of a config in each format, after one in fp32 and one that was cut."""
        state = LatticeState(LATTICE, 4 * GIB)
        acquisition = Acquisition(plan_of(state), state)
        acquisition.use(Predictions(by_config=by_config))
        state.learn(make_trial(PLAIN, fits(1.0, 512.0)))
        if least is not None:
            outcome = TimedOut(reason="slow", deadline_seconds=60.0, least_step_seconds=least)
            state.learn(make_trial(cut, outcome))
        others = {text: PLAIN.replace(precision=text, micro_batch=1) for text in ("bf16", "fp32")}
        return {text: acquisition.belief.expected_seconds(config) for text, config in others.items()}

    without, below, above = seconds(None), seconds(0.2), seconds(30.0)
    assert below == without
    assert above["bf16"] > 3 * without["bf16"] and above["fp32"] < 1.5 * without["fp32"]


def test_a_bound_that_only_a_first_micro_step_has_shown_is_doubted() -> None:
    """Kernels may have been generated in it: the config may still be the fastest, which the regret bound counts."""
    cut = PLAIN.replace(precision="bf16")

    def bound_and_state(*, is_proven: bool) -> tuple[float, LatticeState]:
        state = LatticeState(LATTICE, 4 * GIB)
        acquisition = Acquisition(plan_of(state), state)
        state.learn(make_trial(PLAIN, fits(1.0, 512.0)))
        state.take(cut)
        outcome = TimedOut(reason="slow", deadline_seconds=60.0, least_step_seconds=2.0, is_proven=is_proven)
        state.learn(make_trial(cut, outcome))
        state.rule_out(dict.fromkeys(state.open, "of no interest here"))
        (winner,) = state.points()
        return acquisition.belief.regret_bound(winner), state

    (proven, sure), (doubted, unsure) = bound_and_state(is_proven=True), bound_and_state(is_proven=False)
    assert cut in sure.trials and cut in unsure.trials, "neither is tried again in this search"
    assert proven == 0.0 < doubted < 0.5
    again = LatticeState(LATTICE, 4 * GIB)
    again.recall_bounds([unsure.trials[cut]])
    assert again.least_step_seconds == {cut: 2.0} and not again.proven_step_seconds


def test_the_order_in_time_gives_way_to_what_trials_show() -> None:
    """Keeping activations takes three times as long as was predicted, and longer than recomputing them should. That
    these can only be slower holds almost everywhere: a trial is worth it, and shows that it does not hold here."""
    plain = [PLAIN.replace(checkpointing="none", micro_batch=size) for size in (1, 2, 4)]

    same_work = tuple(c for c in LATTICE.configs if c.replace(checkpointing="none") in plain)
    state = LatticeState(Lattice(axes=LATTICE.axes, configs=same_work), 4 * GIB)
    acquisition = Acquisition(plan_of(state, goal=Goal(method="full")), state)
    by_config = {c: predicted(GIB, 1.0 if c["checkpointing"] == "none" else 1.3, error=0.1) for c in same_work}
    acquisition.use(Predictions(by_config=by_config))
    for config in plain:
        state.learn(make_trial(config, fits(1.0, 512.0 / 3.0)))
    tried, other, *_ = acquisition.worthwhile()
    assert tried.expected_gain < 0.1, "it is hardly believed"
    state.learn(make_trial(tried.config, fits(1.0, 512.0 / 2.0)))
    later = next(c for c in acquisition.candidates() if c.config == other.config)
    assert later.expected_gain > 2.0 * other.expected_gain


@pytest.mark.parametrize("size", [0, 1, 10])
def test_explanations_share_one_belief(size: int) -> None:
    choose = random.Random(size)
    mixture = belief([measured(config, choose.choice([1.0, 1.0, 40.0])) for config in sample(size)])
    assert mixture.weights.sum() == pytest.approx(1.0) and (mixture.weights >= 0.0).all()
    assert np.isfinite(mixture.mean).all() and (mixture.deviation > 0.0).all()


def drawn(config: Config, effects: float, noise: float, seed: int) -> float:
    """The logarithm of a figure whose axes' effects, and what else each config does, spread that far."""
    return sum(random.Random(f"{seed} {item}").gauss(0, effects) for item in config.items) + random.Random(
        f"{seed} {config}"
    ).gauss(0, noise)


@pytest.mark.parametrize("effects", [0.2, 0.03])
@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_how_far_predictions_are_off_is_learned(effects: float, noise: float) -> None:
    """Of the truths that the prior takes for possible, about 95 % lie within two deviations, whichever it is; and
    where predictions are good, or figures scatter little, the deviations are the narrower for it."""
    within, widths = [], []
    for seed in range(10):
        truth = np.array([drawn(config, effects, noise, seed) for config in LATTICE.configs])
        observations = [TimeObservation(c, drawn(c, effects, noise, seed), TIMING) for c in sample(12, seed)]
        prediction = belief(observations).together
        within.append((np.abs(prediction.mean - truth) < 2 * prediction.deviation).mean())
        widths.append(prediction.deviation.mean())
    assert np.mean(within) > 0.9
    assert np.mean(widths) < 2 * (math.hypot(noise, effects) if effects > 0.1 else math.hypot(noise, 2 * effects))


def test_what_blurs_a_measurement_is_no_part_of_the_figure() -> None:
    def of_own(blur: float) -> LogNormal:
        times = StepTimes(Lattice(axes=LATTICE.axes, configs=(PLAIN,)), time_error(1.0))
        return times.predict([TimeObservation(PLAIN, 0.0, blur)] * 50, np.array([0])).together

    clear, blurred = of_own(0.0), of_own(0.3)
    assert clear.deviation[0] < blurred.deviation[0] < 0.1


def test_a_large_lattice_with_many_trials_is_no_obstacle() -> None:
    axes = (False, True), ("sdpa", "flash", "eager"), ("fused", "chunked", "full"), range(1, 48)
    varied = (
        config.replace(compile=compiled, attention=attention, loss=loss, rank=rank)
        for compiled, attention, loss, rank in itertools.product(*axes)
        for config in LATTICE.configs
        if config["method"] != "full"
    )
    configs = tuple(itertools.islice(dict.fromkeys(varied), 20_000))
    assert len(configs) == 20_000
    choose = random.Random(1)
    trials = [measured(config, choose.choice([0.9, 1.0, 1.1, 25.0])) for config in choose.sample(configs, 40)]
    mixture = belief(trials, Lattice(axes=LATTICE.axes, configs=configs))
    assert mixture.mean.shape == (len(mixture.weights), 20_000)
    assert np.isfinite(mixture.together.mean).all()
