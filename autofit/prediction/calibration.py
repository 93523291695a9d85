"""What the store's trials and probes show of a device: its speed, CUDA there, and how far off predicted memory is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autofit.catalog.hardware import card_of
from autofit.core.device.hardware import Hardware
from autofit.core.device.probe import between, shapes_key
from autofit.core.errors import StoreError
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Measurement, Trial
from autofit.core.prediction import StepWork
from autofit.core.workload import METHODS
from autofit.estimate.assumptions import as_probed, rounded_context
from autofit.estimate.estimate import Estimate
from autofit.estimate.footprint import Footprint
from autofit.estimate.memory.deviation import MemoryDeviation, nothing_compared
from autofit.estimate.version import is_current
from autofit.prediction.machine_link import with_link
from autofit.prediction.memory_deviations import COMPARED, learned
from autofit.prediction.probing import rates_of, stored_probe
from autofit.store import Store
from autofit.techniques import Job, needs_process_group, unsupported
from autofit.techniques.axes.optimizer import OPTIMIZERS

if TYPE_CHECKING:
    from autofit.estimate.time.roofline import Rates

LATEST = 50
"""Number of trials used: enough to fit a handful of rates. Each trial's error is that of a fit without it, so the cost
grows with the square of this number."""

TimedSteps = dict[tuple[str, Config], tuple[StepWork, float]]
"""Work and seconds of measured steps, by workload key and config."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A job with what trials and probes show of its device."""

    job: Job
    """With CUDA's allocator and context as they were there."""
    rates: Rates | None
    """None for a device about which nothing is known."""
    deviations: Mapping[str, MemoryDeviation]
    """How far predicted memory is off, by method."""

    @classmethod
    def of(cls, job: Job, store: Store | None) -> Calibration:
        """As the store shows it; without a store, or with one that fails, what is assumed without any trial."""
        try:
            return cls(
                job=as_trials_show(job, store), rates=rates_for(job, store), deviations=memory_deviations(job, store)
            )
        except StoreError as error:
            _log.warning("autofit: predictions are not calibrated by trials: %s", error)
            return cls.of(job, None)

    def estimate(self, footprint: Footprint) -> Estimate:
        """The estimate of a footprint of the job, with its time and with how far its memory may be off."""
        return Estimate.of(footprint, self.job, self.rates, self.deviations)


def not_estimated(device: Hardware) -> str | None:
    """Why nothing can be estimated for a device, in one sentence; None if it can."""
    if device.is_nvidia or device.kind == "cpu":
        return None
    of_catalog = card_of(device.name)
    instead = ": measure on it with `autofit search`" if of_catalog and "search" in of_catalog.supports else ""
    return f"estimates are for NVIDIA cards and this machine's CPU; {device.name} is neither{instead}"


def why_not(config: Config, job: Job) -> str | None:
    """Why `config` cannot be estimated for `job`, in one sentence; None if it can."""
    return not_estimated(job.hardware) or unsupported(config, job)


def rates_for(job: Job, store: Store | None) -> Rates | None:
    """The rates of the job's hardware under its stack, fitted to the store's trials of any model and workload, with
    their expected error on this workload. Where the store has a probe of this very device, the fit starts from that and
    not from the data sheet, at the shapes of the job's model if it was probed there. Trials of several ranks count
    where these were spread over machines as the job's are: another spread has another link.

    A catalog card that is not in this machine uses the trials of all stored cards of that name, under the stack of the
    latest of these trials. Returns a guess (`calibrated_on` 0) where no trial is usable, and None for a device about
    which nothing is known. Raises `StoreError`.
    """
    from autofit.estimate.time.guessed_rates import prior

    guess = prior(job.hardware)
    if guess is None or store is None:
        return guess
    if is_detected(job.hardware):
        probe = stored_probe(job.hardware, job.stack, store, job.model.digest)
        guess = guess if probe is None else rates_of(probe, guess, shapes=shapes_key(job.model.digest))
        guess = with_link(guess, job, store)
        trials = latest_fits(job.hardware, store, LATEST, stack_key=job.stack.key)
    else:
        trials = latest_fits(job.hardware, store, LATEST)[:LATEST]
        trials = [trial for trial in trials if trial.stack.key == trials[0].stack.key]
    link = between(job.hardware, job.workload.devices)
    alike = (t for t in trials if t.workload.devices == 1 or between(t.hardware, t.workload.devices) == link)
    return _calibrated_for(job.workload.key, guess, alike)


def _calibrated_for(workload_key: str, guess: Rates, newest_first: Iterable[Trial]) -> Rates:
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


def as_trials_show(job: Job, store: Store | None) -> Job:
    """The job with what a probe, or trials of any model, workload and stack, in the store show of CUDA on its hardware:
    whether the allocator has expandable segments, and the context. Raises `StoreError`.

    For a catalog card that is not in this machine, the latest trial on any card of that name counts. Without a trial or
    a probe both stay unknown.
    """
    if store is None or job.hardware.kind != "cuda":
        return job
    latest = latest_fits(job.hardware, store, 20)
    return as_probed(with_observed_allocator(job, latest), stored_probe(job.hardware, job.stack, store, None))


def with_observed_allocator(job: Job, newest_first: Iterable[Trial]) -> Job:
    """The job with the allocator and context of the latest trial that fitted on CUDA; unchanged without such a trial.
    Paged states lie outside the allocator as the context does, so that only the latest trial without them shows the
    context. Trials of users' programs do not count: these choose their allocator."""
    shown = [
        (trial.outcome.measurement, trial.config)
        for trial in newest_first
        if trial.workload.program is None and isinstance(trial.outcome, Fits) and trial.hardware.kind == "cuda"
    ]
    if not shown:
        return job
    unpaged = (measured for measured, config in shown if not _has_paged_states(config))
    outside_bytes = next((measured.device_bytes - measured.peak_reserved_bytes for measured in unpaged), 0)
    context = rounded_context(outside_bytes) if outside_bytes > 0 else None
    return replace(job, expandable_segments=shown[0][0].expandable_segments, context_bytes=context)


def _has_paged_states(config: Config) -> bool:
    optimizer = OPTIMIZERS.get(str(config.get("optimizer")))  # an old config may lack it
    return optimizer is not None and optimizer.paged


def memory_deviations(job: Job, store: Store | None) -> dict[str, MemoryDeviation]:
    """For each method, how far predictions were from the trials on the job's hardware, of any model, workload and
    stack. A method without trials has what is assumed. Raises `StoreError`."""
    unseen = nothing_compared(job.hardware, job.workload.devices)
    trials: list[Trial] = []
    if store is not None:
        for key in hardware_keys(job.hardware, store):
            trials += (t for t in store.predicted(hardware_key=key, latest=COMPARED) if t.workload.program is None)
    return {method: learned((t for t in trials if t.config.get("method") == method), unseen) for method in METHODS}


def latest_fits(hardware: Hardware, store: Store, most: int, *, stack_key: str | None = None) -> list[Trial]:
    """The latest trials of autofit's own step that fitted, newest first: at most so many under each of the hardware's
    keys. Users' programs load data and do whatever else they do, and choose their allocator."""
    trials = [
        trial
        for key in hardware_keys(hardware, store)
        for trial in store.trials(
            hardware_key=key, stack_key=stack_key, outcome=Fits.kind, own_step=True, limit=most, newest_first=True
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
