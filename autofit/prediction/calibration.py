"""How fast a device is, as shown by the store's trials on it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.errors import StoreError
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Measurement, Trial
from autofit.core.prediction import StepWork
from autofit.estimate.version import is_current
from autofit.prediction.probing import probed_guess
from autofit.store import Store
from autofit.techniques import needs_process_group

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autofit.estimate.time.roofline import Rates

LATEST = 50
"""Number of trials used: enough to fit a handful of rates. Each trial's error is that of a fit without it, so the cost
grows with the square of this number."""

TimedSteps = dict[tuple[str, Config], tuple[StepWork, float]]
"""Work and seconds of measured steps, by workload key and config."""

_log = logging.getLogger(__name__)


def rates_for(
    hardware: Hardware, stack: Stack, store: Store | None, workload_key: str, model_digest: str | None = None
) -> Rates | None:
    """The rates of this hardware under this stack, fitted to the store's trials of any model and workload, with their
    expected error on the workload with this key. Where the store has a probe of this very device, the fit starts
    from that and not from the data sheet, at the shapes of the model with this digest if it was probed there.

    A catalog card that is not in this machine uses the trials of all stored cards of that name, under the stack of the
    latest of these trials. Returns a guess (`calibrated_on` 0) where no trial is usable or the store fails, and None
    for a device about which nothing is known.
    """
    from autofit.estimate.time.guessed_rates import prior

    guess = prior(hardware)
    if guess is None or store is None:
        return guess
    try:
        if is_detected(hardware):
            guess = probed_guess(guess, hardware, stack, store, model_digest)
        trials = _trials(hardware, stack, store)
    except StoreError as error:
        _log.warning("autofit: speed is guessed, not calibrated: %s", error)
        return guess
    return calibrated_for(workload_key, guess, trials)


def calibrated_for(workload_key: str, guess: Rates, newest_first: Iterable[Trial]) -> Rates:
    """`guess` fitted to trials. The error on a workload that none of them has is estimated by leaving out one of their
    workloads at a time."""
    from autofit.estimate.time.fitted_rates import calibrated

    every = _latest(newest_first)
    # One device alone shows what it can do: communication and work on the host take time of their own, so trials with
    # either count for that only if there are no others. How long transfers and the host take, they show, too.
    alone = {key: step for key, step in every.items() if not needs_process_group(key[1])} or every
    timed = {**alone, **{key: (work, taken) for key, (work, taken) in every.items() if work.waits}}
    groups = [workload for workload, _ in timed]
    is_covered = workload_key in {workload for workload, _ in alone}
    return calibrated(guess, list(timed.values()), () if is_covered else groups, [key not in alone for key in timed])


def _latest(newest_first: Iterable[Trial]) -> TimedSteps:
    """The latest measurement of each config and workload; a full one is preferred to one that was stopped early.

    Trials that were not predicted by this version of the estimator are skipped, as is what ran on a device that is not
    what it is called. Those whose time is in doubt count only where a config has no other.
    """
    latest: dict[tuple[str, Config], tuple[StepWork, Measurement]] = {}
    for trial in sorted(newest_first, key=lambda trial: bool(trial.doubts)):  # the newest first within each
        prediction = trial.prediction
        if trial.workload.program is not None:
            continue  # it loads data and does whatever else a user's program does
        if trial.why_set_aside:
            continue
        if prediction is None or prediction.work is None or not is_current(prediction):
            continue
        if isinstance(trial.outcome, Fits):
            key, measurement = (trial.workload.key, trial.config), trial.outcome.measurement
            if key not in latest or (latest[key][1].stopped_early and not measurement.stopped_early):
                latest[key] = prediction.work, measurement
    return {key: (work, measurement.step_seconds.median) for key, (work, measurement) in latest.items()}


def _trials(hardware: Hardware, stack: Stack, store: Store) -> list[Trial]:
    """The latest trials that fitted, newest first."""
    if is_detected(hardware):
        return latest_fits(hardware, store, LATEST, stack_key=stack.key)
    trials = latest_fits(hardware, store, LATEST)[:LATEST]
    return [trial for trial in trials if trial.stack.key == trials[0].stack.key]


def latest_fits(hardware: Hardware, store: Store, most: int, *, stack_key: str | None = None) -> list[Trial]:
    """The latest trials that fitted, newest first: at most so many under each of the hardware's keys."""
    trials = [
        trial
        for key in hardware_keys(hardware, store)
        for trial in store.trials(
            hardware_key=key, stack_key=stack_key, outcome=Fits.kind, limit=most, newest_first=True
        )
    ]
    return sorted(trials, key=lambda trial: trial.recorded_at, reverse=True)


def is_detected(hardware: Hardware) -> bool:
    """Whether it is a device detected here, under the name that its driver reports, and not a card of the catalog."""
    return hardware.device_name != hardware.name


def hardware_keys(hardware: Hardware, store: Store) -> list[str]:
    """Keys of the hardware whose trials show what `hardware` does: its own or, for a catalog card that is not in this
    machine, those of all stored cards of that name."""
    if is_detected(hardware):
        return [hardware.key]
    return [stored.key for stored in store.hardware() if stored.name == hardware.name]
