"""The small model of memory and speed: it finds a truth of its own kind, and knows how much it knows."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from autofit.core.lattice import Config, Lattice
from autofit.search.acquisition.surrogate import ACTIVATIONS, TIME, Features, LogLinear, LogNormal, Prior

FIGURES = (TIME, ACTIVATIONS)
OF_FIGURES = pytest.mark.parametrize("figure", FIGURES, ids=["time", "activations"])


def synthetic(config: Config, seed: int) -> float:
    """The logarithm of a figure that is a product of the axes' effects."""
    total = 2.0
    for name, value in config.items:
        if name == "micro_batch":
            total += random.Random(f"{seed} doubling").uniform(-0.3, 0.6) * math.log2(config.number(name))
        else:
            total += random.Random(f"{seed} {name} {value}").gauss(0, 0.2)
    return total


def sample(lattice: Lattice, size: int, seed: int = 0) -> list[Config]:
    return random.Random(seed).sample(lattice.configs, size)


def errors(lattice: Lattice, figure: Prior, measured: list[Config], seed: int) -> tuple[np.ndarray, LogNormal]:
    """What the model is off by for every config of the lattice, from noise-free figures of the measured."""
    model = LogLinear(lattice, figure)
    prediction = model.predict([(c, synthetic(c, seed)) for c in measured], lattice.configs)
    return prediction.mean - np.array([synthetic(c, seed) for c in lattice.configs]), prediction


@OF_FIGURES
@pytest.mark.parametrize("seed", range(5))
def test_a_log_linear_truth_is_recovered(lattice: Lattice, figure: Prior, seed: int) -> None:
    off, _ = errors(lattice, figure, sample(lattice, 30), seed)
    assert np.abs(off).mean() < 0.05
    assert np.abs(off).max() < 0.15


@OF_FIGURES
def test_the_error_becomes_smaller_with_every_dozen_of_trials(lattice: Lattice, figure: Prior) -> None:
    mean_errors = [np.abs(errors(lattice, figure, sample(lattice, size), 1)[0]).mean() for size in (2, 12, 24, 96)]
    assert mean_errors == sorted(mean_errors, reverse=True)
    assert mean_errors[-1] < 0.02


@OF_FIGURES
def test_deviations_shrink_down_to_the_noise(lattice: Lattice, figure: Prior) -> None:
    configs = sample(lattice, 100)
    earlier = None
    for size in (0, 1, 5, 20, 100):
        _, prediction = errors(lattice, figure, configs[:size], 1)
        assert (prediction.deviation >= figure.noise).all()
        if earlier is not None:
            assert (prediction.deviation <= earlier + 1e-9).all()
        earlier = prediction.deviation
    assert earlier is not None and earlier.max() < 2 * figure.noise


def test_deviations_are_honest(lattice: Lattice) -> None:
    """Of truths that the prior can draw, about 95 % lie within two deviations."""
    within = []
    for seed in range(20):
        off, prediction = errors(lattice, TIME, sample(lattice, 15, seed), seed)
        within.append((np.abs(off) < 2 * prediction.deviation).mean())
    assert np.mean(within) > 0.9


@OF_FIGURES
def test_without_trials_it_says_what_a_practitioner_would(lattice: Lattice, figure: Prior) -> None:
    model = LogLinear(lattice, figure)
    plain = next(c for c in lattice.configs if c["method"] == "full" and c["checkpointing"] == "none")
    pair = (plain, plain.replace(checkpointing="full"))
    mean = model.predict([], pair).mean
    assert (mean[1] > mean[0]) == (figure is TIME)
    small, large = plain.replace(micro_batch=1), plain.replace(micro_batch=2)
    mean = model.predict([], (small, large)).mean
    assert mean[1] - mean[0] == pytest.approx(figure.doubling)


def test_what_was_measured_is_believed_up_to_the_noise(lattice: Lattice) -> None:
    model = LogLinear(lattice, TIME)
    config = lattice.configs[0]
    prediction = model.predict([(config, 1.5)], [config])
    assert prediction.mean[0] == pytest.approx(1.5, abs=TIME.noise)
    assert prediction.deviation[0] < 2 * TIME.noise
    twice = model.predict([(config, 1.5), (config, 1.5)], [config])
    assert twice.deviation[0] < prediction.deviation[0]


def test_a_lattice_of_one_config_has_a_model() -> None:
    from autofit.techniques import AXES, complete

    config = complete({})
    prediction = LogLinear(Lattice(axes=AXES, configs=(config,)), TIME).predict([(config, 0.5)], [config])
    assert prediction.mean[0] == pytest.approx(0.5, abs=0.05)


def made_prior(weight: float) -> Prior:
    return Prior(intercept_spread=0.1, spread=0.03, noise=0.02, weight=weight)


def test_what_is_predicted_is_the_mean_until_trials_show_the_error(lattice: Lattice) -> None:
    predicted = {c: synthetic(c, 1) for c in lattice.configs}
    model = LogLinear(lattice, made_prior(3.0), predicted)
    assert model.predict([], lattice.configs).mean == pytest.approx(list(predicted.values()))
    measured = [(c, predicted[c] + 0.2) for c in sample(lattice, 12)]
    prediction = model.predict(measured, lattice.configs)
    assert prediction.mean == pytest.approx([y + 0.2 for y in predicted.values()], abs=0.03)


@pytest.mark.parametrize(("off", "wider"), [(0.0, False), (0.05, False), (0.6, True)])
def test_deviations_grow_where_trials_contradict_them(lattice: Lattice, off: float, wider: bool) -> None:
    """Errors that differ from trial to trial by more than the prior says cannot be known better than they differ."""
    measured = [(c, off * (-1) ** number) for number, c in enumerate(sample(lattice, 10))]
    fixed, learnt = (
        LogLinear(lattice, made_prior(weight)).predict(measured, lattice.configs).deviation
        for weight in (math.inf, 3.0)
    )
    assert (learnt > 5 * fixed).all() if wider else (learnt < 2 * fixed).all()


@pytest.mark.parametrize("least", [-0.3, 0.0, 0.2])
def test_what_exceeded_a_bound_says_as_much_of_the_others_as_draws_do(lattice: Lattice, least: float) -> None:
    """Of draws from the prior, those are kept in which one config exceeds the bound."""
    prior = Prior(intercept_spread=0.1, spread=0.1, noise=0.05)
    one, *others = sample(lattice, 4)
    every, draws = Features(lattice, prior), np.random.default_rng(0)
    model, rows = LogLinear(lattice, prior), every.rows([one, *others])
    prediction = model.predict_rows([], rows[1:], [(one, least)])
    effects = draws.normal(size=(400_000, len(every.spreads))) * every.spreads
    figures = effects @ every.matrix[rows].T + every.expected[rows]
    figures += prior.noise * draws.normal(size=figures.shape)
    kept = figures[figures[:, 0] > least, 1:]
    assert prediction.mean == pytest.approx(kept.mean(axis=0), abs=0.005)
    assert prediction.deviation == pytest.approx(kept.std(axis=0), rel=0.02)
