"""A device's rates fitted to measured trials, and how far they miss trials that they were not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from autofit.core.device.work_kinds import KINDS
from autofit.core.prediction import StepWork
from autofit.estimate.time.roofline import WAITING_ERROR, Features, Rates, parts, seconds, waits, without_waiting

PRIOR_WEIGHT = 0.3
"""Weight of a rate's relative distance from the scaled guess against a trial's relative error."""
WAITING_WEIGHT = 0.1
"""The same weight for the factor of waiting: a trial's time is off by some 5 %, the guess by `WAITING_ERROR`."""
LEAST_RATIO = 0.1
"""No rate falls below this share of the scaled guess, whatever a few trials suggest."""


def calibrated(
    prior: Rates,
    measured: Sequence[tuple[StepWork, float]],
    groups: Sequence[str] = (),
    only_waiting: Sequence[bool] = (),
) -> Rates:
    """Rates fitted to measured (work, seconds), with their relative error on held-out trials.

    That error is the median of the leave-one-out errors and one more, the larger of the worst of them and the guess's
    own, so that two or three trials cannot make the fit look exact. `groups`, the group of each trial, are given where
    the rates are for a group not among them, such as another model: each group is then left out as a whole and counts
    as one error, the median of its trials', because what its trials have in common is a single draw.

    `only_waiting` says which trials show nothing but how long the arithmetic waits for transfers and for the host. They
    count in no error but that of waiting.
    """
    if not measured:
        return prior
    count = len(measured)
    waiting_flags = list(only_waiting) or [False] * count
    group_names = list(groups) or [str(place) for place in range(count)]
    trials = list(zip(measured, waiting_flags, group_names, strict=True))
    rates = {
        left_out: _fit(prior, [(trial, waits_only) for trial, waits_only, group in trials if group != left_out])
        for left_out in dict.fromkeys(group_names)
    }

    def held_out(missed: Callable[[StepWork, float, Rates], float], *, waiting: bool) -> list[float]:
        by_group: dict[str, list[float]] = {}
        for (work, taken), waits_only, group in trials:
            if work.waits if waiting else not waits_only:
                by_group.setdefault(group, []).append(missed(work, taken, rates[group]))
        return [float(np.median(errors)) for errors in by_group.values()]

    error = _tempered_error(held_out(_relative_error, waiting=False), prior.relative_error)
    waited = held_out(partial(_waiting_error, error), waiting=True)
    return replace(
        _fit(prior, [(trial, waits_only) for trial, waits_only, _ in trials]),
        calibrated_on=count,
        relative_error=error,
        waiting_error=_tempered_error(waited, max(WAITING_ERROR, prior.relative_error)) if waited else None,
    )


def _relative_error(work: StepWork, taken: float, rates: Rates) -> float:
    return abs(seconds(work, rates) / taken - 1.0)


def _waiting_error(relative_error: float, work: StepWork, taken: float, rates: Rates) -> float:
    """Relative error of the seconds of waiting, between 0 and 1, if that of all other seconds is `relative_error`.
    With it `Rates.error_of` says how far the whole step is off."""
    share = rates.waiting_share(work)
    return min(1.0, max(0.0, (_relative_error(work, taken, rates) - (1.0 - share) * relative_error) / share))


def _tempered_error(errors: Sequence[float], guessed: float) -> float:
    """The median of the errors and one more: the largest of them, or the guess's error if that is larger."""
    return float(np.median([*errors, max(guessed, *errors)]))


def _fit(prior: Rates, measured: Sequence[tuple[tuple[StepWork, float], bool]]) -> Rates:
    """The rates and the factor of waiting, each fitted in turn while the other stands. With each trial comes whether
    it shows waiting alone."""
    computing = [trial for trial, only_waiting in measured if not only_waiting]
    waiting = [(work, taken) for (work, taken), _ in measured if work.waits]
    rates = _fitted_rates(prior, computing)
    if waiting:
        rates = _fitted_rates(replace(prior, waiting=_fitted_waiting(rates, waiting, prior.waiting)), computing)
        rates = replace(rates, waiting=_fitted_waiting(rates, waiting, prior.waiting))
    return rates


def _fitted_waiting(rates: Rates, measured: Sequence[tuple[StepWork, float]], prior: float) -> float:
    """Seconds of waiting over those that `rates.transfers` tells, by ridge regression towards `prior`."""
    shares = np.array([waits(work, rates) / taken for work, taken in measured])
    left = np.array([1.0 - without_waiting(work, rates) / taken for work, taken in measured])
    ratio = (shares @ left + WAITING_WEIGHT**2 * prior) / (shares @ shares + WAITING_WEIGHT**2)
    return max(float(ratio), LEAST_RATIO)


def _fitted_rates(prior: Rates, measured: Sequence[tuple[StepWork, float]]) -> Rates:
    """The rates. First one factor for all, the median over the trials, so that even one trial moves every rate. Then
    ridge regression (Hoerl and Kennard 1970) of relative errors on each rate's ratio to the scaled guess."""
    if not measured:
        return prior
    taken = np.array([max(time - prior.waiting * waits(work, prior), LEAST_RATIO * time) for work, time in measured])

    def relative(rates: Rates) -> Features:
        shares: Features = np.array([parts(work, rates) for work, _ in measured]) / taken[:, None]
        return shares

    scale = np.exp(-np.median(np.log(relative(prior).sum(axis=1))))
    scaled = rates = prior.times(np.full(len(KINDS), scale))
    for _ in range(5):  # may revise which trials are host-bound
        features = relative(rates) * (scaled.as_array() / rates.as_array())
        left = np.vstack([features, PRIOR_WEIGHT * np.eye(len(KINDS))])
        right = np.concatenate([np.ones(len(features)), np.full(len(KINDS), PRIOR_WEIGHT)])
        rates = scaled.times(np.maximum(np.linalg.lstsq(left, right, rcond=None)[0], LEAST_RATIO))
        if prior.processor:
            break
    return rates
