"""A device's measured rates: probed once, kept in the store, and used in place of its data sheet."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from autofit.catalog.models import Model, load
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import (
    BETWEEN_RANKS,
    UPDATE_ON_HOST,
    WAYS,
    MeasuredStep,
    Probe,
    link_rate,
    shapes_key,
    transfer,
)
from autofit.core.device.work_kinds import HOST_LINK, HOST_UPDATE, INDEX, KINDS, LAUNCH, LINK, update
from autofit.core.errors import AutofitError, in_one_line
from autofit.core.prediction import StepWork
from autofit.estimate.version import ESTIMATOR_VERSION, is_current
from autofit.probe.shapes import usual_model
from autofit.store import Store
from autofit.techniques import Job, needs_process_group
from autofit.trial.machine import device_lock
from autofit.trial.machine.detection import detect
from autofit.trial.process.group_runner import tell_of_waiting

if TYPE_CHECKING:
    from autofit.estimate.time.roofline import Rates

_log = logging.getLogger(__name__)

TimedWork = tuple[StepWork, float]
"""Work, and the seconds that it took."""


def probe(
    *, device: str = "auto", model: str | None = None, fresh: bool = False, store: str | None = None
) -> tuple[Probe, bool]:
    """The rates of this machine's device at the shapes of `model`, and whether they were measured just now.

    Looked up in the store for the same hardware and stack, unless `fresh`; else measured in 10 to 20 s, and kept.
    Raises `EnvironmentLacks` if there is no such device or nothing can be measured on it, `UsageError` for an unknown
    model, and `StoreError`.
    """
    hardware, stack = detect(device)
    with Store.open(store) as opened:
        return probed(load(model or usual_model(hardware.kind)), hardware, stack, opened, fresh=fresh)


def probed(
    model: Model,
    hardware: Hardware,
    stack: Stack,
    store: Store,
    *,
    fresh: bool = False,
    ranks: int = 1,
    most_seconds: float = math.inf,
) -> tuple[Probe, bool]:
    """`probe` for a given device, in an open store. A probe that met a busy or throttled device is repeated at once and
    in the next search; one that trials have contradicted since is repeated, too. If parts ran out of memory or time,
    only these are repeated. What happens between `ranks` is measured once there are several, whatever their number."""
    stored = None if fresh else stored_probe(hardware, stack, store, model.digest)
    usable = None if stored is None or stored.shapes_key != shapes_key(model.digest) else stored
    was_doubted = usable is not None and bool(usable.doubts)
    if usable is not None and (was_doubted or _is_contradicted(usable, store)):
        usable = None
    if usable is not None and not _parts_to_measure(usable, ranks):
        return usable, False
    # A device that was busy then, too, may always be: one more probe is enough.
    attempts = 1 if was_doubted else 2
    new = undisturbed_probe(model, hardware, stack, usable, ranks=ranks, attempts=attempts, most_seconds=most_seconds)
    if stored is not None and stored.shapes_key == new.shapes_key:
        new = replace(stored.completed_by(new), device_state=new.device_state, seconds=new.seconds)
    store.probes.keep(new)
    return new, True


def _parts_to_measure(stored: Probe, ranks: int) -> tuple[str, ...]:
    """The parts of a stored probe that are to be measured now."""
    between = () if any(part.name == BETWEEN_RANKS for part in stored.parts) else (BETWEEN_RANKS,)
    return tuple(name for name in (*stored.cut_short, *between) if ranks > 1 or name != BETWEEN_RANKS)


def undisturbed_probe(
    model: Model,
    hardware: Hardware,
    stack: Stack,
    stored: Probe | None = None,
    *,
    ranks: int = 1,
    attempts: int = 2,
    most_seconds: float = math.inf,
) -> Probe:
    """A new probe, made while no trial runs on the device. It is repeated, up to so many `attempts`, if something else
    ran; a `stored` one is completed by the parts that it lacks. All of it, waiting for the device included, takes about
    `most_seconds` at most, beside loading the libraries. Raises `EnvironmentLacks`, and `GivenUp` where the device is
    not free in time."""
    from autofit.probe.run import run

    until = time.monotonic() + most_seconds

    def measured(**arguments: Any) -> Probe:
        return run(model, hardware, stack, ranks=ranks, most_seconds=until - time.monotonic(), **arguments)

    devices = device_lock.names(hardware.kind, ranks)
    with device_lock.held(devices, waiting=tell_of_waiting, most_seconds=most_seconds):
        if stored is not None:
            return stored.completed_by(measured(known=stored, parts=_parts_to_measure(stored, ranks)))
        new = measured()
        for _ in range(attempts - 1):
            if new.doubts and time.monotonic() + new.seconds < until:
                new = measured()
        return new


def _is_contradicted(stored: Probe, store: Store) -> bool:
    """Whether the latest 50 trials of autofit's own step differ from the probe by a factor of two or more in the
    median: those since then of the same model, on one device alone, whose time is not in doubt. The memory of one
    shared machine was twice as fast half a minute later (benchmarks/README.md, other processors). A trial that was cut
    counts if it takes five times as long at least: that bound comes from a first micro-step, which is the slowest."""
    from autofit.estimate.time.guessed_rates import prior
    from autofit.estimate.time.roofline import seconds

    guess = prior(stored.hardware)
    if guess is None:
        return False
    rates = rates_of(stored, guess)
    hardware_key, stack_key = stored.hardware.key, stored.stack.key
    errors, least = [], 1.0
    latest = store.trials(hardware_key=hardware_key, stack_key=stack_key, own_step=True, limit=50, newest_first=True)
    for trial in latest:
        prediction = trial.prediction
        if trial.recorded_at <= stored.recorded_at or shapes_key(trial.workload.model_digest) != stored.shapes_key:
            continue
        if trial.doubts or needs_process_group(trial.config) or trial.config.get("compile") is True:
            continue  # a first micro-step that compiles bounds nothing
        if prediction is None or not is_current(prediction):
            continue
        # What was predicted without counting its work, of an emulated format, is compared by the figure itself.
        predicted_seconds = prediction.step_seconds if prediction.work is None else seconds(prediction.work, rates)
        if not predicted_seconds:
            continue
        if trial.measurement is not None:
            errors.append(abs(math.log(trial.measurement.step_seconds.median / predicted_seconds)))
        least = max(least, (trial.least_step_seconds or 0.0) / predicted_seconds)
    return (bool(errors) and median(errors) > math.log(2.0)) or least > 5.0


def stored_probe(hardware: Hardware, stack: Stack, store: Store, model_digest: str | None) -> Probe | None:
    """The store's probe of this very device: at the shapes of the model with this digest or, if there is none, the
    latest at those of another. One that cannot be read counts as absent."""
    shapes = None if model_digest is None else shapes_key(model_digest)
    try:
        return store.probes.find(hardware_key=hardware.key, stack_key=stack.key, shapes_key=shapes)
    except (KeyError, TypeError, ValueError) as error:
        _log.debug("a stored probe cannot be read: %s", error)
        return None


def usual_rates(job: Job, store: Store) -> Probe | None:
    """The store's probe of the job's hardware and stack, at the shapes at which workers compare their devices; None if
    there is none, or if it met a busy or throttled device."""
    digest = load(usual_model(job.hardware.kind)).digest
    stored = stored_probe(job.hardware, job.stack, store, digest)
    return None if stored is None or stored.shapes_key != shapes_key(digest) or stored.doubts else stored


def rates_of(device_probe: Probe, guess: Rates, *, shapes: str | None = None) -> Rates:
    """`guess` with the rates that a probe has measured in its place, scaled by what a few layers' real step took: the
    rates of a decoder layer's operations by what two further layers add, the others by what is left.

    `shapes` is the key of the shapes that the rates are wanted for: those measured at another model's are off by 0.15
    more, and those of a device that was busy with something else by 0.5.
    """
    from autofit.estimate.time.fitted_rates import calibrated
    from autofit.estimate.time.roofline import seconds

    seconds_per = list(guess.seconds_per)
    measured = device_probe.seconds_per
    for kind in KINDS:
        if kind in measured:
            seconds_per[INDEX[kind]] = measured[kind]
    rates = replace(guess, seconds_per=tuple(seconds_per), stand_in=None, relative_error=0.3)
    timed = [
        (step.work, step.seconds)
        for step in device_probe.steps
        if step.work and step.work.estimator == ESTIMATOR_VERSION
    ]
    if timed:
        missed = max(abs(seconds(work, rates) / taken - 1.0) for work, taken in timed)
        scaled = calibrated(rates, _apart(device_probe.steps, timed, rates))
        # Not below 10 %: the few layers are not the whole step, and one config of many.
        rates = replace(scaled, calibrated_on=0, relative_error=max(missed / 2.0, 0.1))
    rates = replace(rates, transfers={**rates.transfers, **transfers_of(device_probe)})
    other = shapes is not None and shapes != device_probe.shapes_key
    more = 0.15 * other + 0.5 * bool(device_probe.doubts)
    return replace(rates, relative_error=rates.relative_error + more)


def transfers_of(device_probe: Probe) -> dict[str, float]:
    """Seconds per byte of the transfers that were measured: to and from the host by the slower way of pinned memory,
    between ranks by the slower collective. A processor updates what is offloaded as it updates everything else."""
    figures = device_probe.figures
    ways = {
        HOST_LINK: [figures.get(transfer(way)) for way in WAYS],
        LINK: [link_rate(figures)],
        HOST_UPDATE: [figures.get(UPDATE_ON_HOST)],
    }
    slowest = {kind: min((rate for rate in rates if rate), default=None) for kind, rates in ways.items()}
    measured = {kind: 1.0 / rate for kind, rate in slowest.items() if rate}
    update_seconds = device_probe.seconds_per.get(update("fp32"))
    is_processor = device_probe.hardware.kind == "cpu"
    return {HOST_UPDATE: update_seconds, **measured} if is_processor and update_seconds else measured


def _apart(steps: Sequence[MeasuredStep], timed: list[TimedWork], rates: Rates) -> list[TimedWork]:
    """Work and seconds of what the steps' further layers add, and of everything but layers. Returns `timed`, which is
    of the whole steps, where their times do not tell these apart: where one waits for launches and the other does not,
    its head hides part of what the layers take."""
    from autofit.estimate.time.roofline import parts

    if len(timed) != 2 or len(steps) != 2:
        return timed
    (few, few_work, few_seconds), (many, many_work, many_seconds) = sorted(
        (step.layers, work, taken) for step, (work, taken) in zip(steps, timed, strict=True)
    )
    added, added_seconds, times = many_work.without(few_work), many_seconds - few_seconds, few / (many - few)
    rest, rest_seconds = few_work.without(added, times), few_seconds - times * added_seconds
    if min(added_seconds, rest_seconds) < 0.05 * few_seconds:
        return timed  # a difference of two times that is so small is noise
    waiting = {parts(work, rates)[INDEX[LAUNCH]] > 0.0 for work in (few_work, many_work, added, rest)}
    if len(waiting) > 1:
        return timed
    return [(added, added_seconds), (rest, rest_seconds)]


def make_sure(job: Job, store: Store, *, budget_seconds: float | None = None) -> None:
    """Probe the job's device unless the store has it, within a tenth of a search's time budget or 30 s, beside loading
    the libraries. A slow device measures less of itself rather than take the trials' time. A failure costs only what
    the probe would have shown."""
    most_seconds = math.inf if budget_seconds is None else max(0.1 * budget_seconds, 30.0)
    try:
        probed(job.model, job.hardware, job.stack, store, ranks=job.workload.devices, most_seconds=most_seconds)
    except (AutofitError, device_lock.GivenUp, OSError, ValueError) as error:
        _log.warning("autofit: continuing without a probe of the device, which failed: %s", in_one_line(error))
