"""What is predicted, as text for people: estimates, advice, frontiers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from autofit.cli.output import columns
from autofit.cli.text.phrases import (
    EFFECTS,
    alternative_line,
    devices_text,
    frontier_heading,
    on_each,
    points_table,
    step_text,
    total_text,
    training_lines,
)
from autofit.core.frontier import by_method
from autofit.core.lattice import Config
from autofit.core.outcome import EVALUATION
from autofit.core.units import counted, format_bytes, format_duration
from autofit.core.workload import METHODS, Workload
from autofit.estimate.assumptions import PACKAGES, of_borrowed
from autofit.estimate.estimate import Change, Estimate
from autofit.estimate.saving import too_much
from autofit.techniques import complete
from autofit.techniques.short_text import short

if TYPE_CHECKING:
    from autofit.operations.sequence_length import Longest
    from autofit.prediction.predicted_frontier import PredictedChoice, PredictedFrontier


CLOSE = "fits only as the allocator gives unused memory back, which slows steps down"


def estimate_text(estimate: Estimate, *, verbose: bool = False) -> str:
    """The verdict, the speed and where the memory goes; `verbose` adds the allocator's figures and what is assumed."""
    memory = f"{format_bytes(estimate.device_bytes)} at the peak{on_each(estimate.devices)}, {memory_text(estimate)}"
    rows = [
        ("config", _departures(estimate.config)),
        ("memory", memory),
        *share_rows(estimate, estimate.breakdown.items()),
        *host_rows(estimate),
        *checkpoint_rows(estimate),
        *([("close", CLOSE)] if estimate.gives_back_cache and estimate.fits_device else []),
        *([("evaluation", _in_evaluation(estimate))] if estimate.peak_phase == EVALUATION else []),
    ]
    if verbose:
        rows += [
            ("allocated", format_bytes(estimate.peak_allocated_bytes)),
            ("reserved", format_bytes(estimate.peak_reserved_bytes)),
            ("by phase", ", ".join(f"{k} {format_bytes(v)}" for k, v in estimate.phase_peaks.items())),
            *(("assumed", sentence) for sentence in estimate.assumptions),
            ("estimated in", format_duration(estimate.seconds_to_estimate)),
        ]
    return f"{verdict_text(estimate)}\n{speed_text(estimate)}\n\n{columns(rows)}"


def share_rows(estimate: Estimate, parts: Iterable[tuple[str, int]]) -> list[tuple[str, str]]:
    """Parts of the memory at the peak, each with its share; none for what takes nothing."""
    shares = {name: f"{format_bytes(size)} ({size / estimate.device_bytes:.0%})" for name, size in parts if size}
    return [(f"  {name.replace('_', ' ')}", share) for name, share in shares.items()]


def advice_text(estimate: Estimate) -> str:
    """The advice that an estimate has, below what `estimate_text` prints of it; empty if it has none."""
    rows = advice_rows(estimate)
    return columns([(f"{label:<{len('  logits and loss')}}", text) for label, text in rows]) if rows else ""


def longest_text(longest: Longest, *, verbose: bool = False) -> str:
    """How long sequences may be, then the estimate of those."""
    length, where = f"{longest.seq_len:,} tokens", devices_text(longest.estimate.hardware, longest.estimate.devices)
    if not longest.estimate.likely_fits:
        verdict = f"not even sequences of {length} are sure to fit {where}"
    elif longest.seq_len == longest.most:
        verdict = f"{length} fit, and none are longer"
    else:
        verdict = f"{length} are the longest sequences that {fit_text(longest.estimate).replace('fits', 'fit')} {where}"
    return f"{verdict}\n\n{estimate_text(longest.estimate, verbose=verbose)}"


def _in_evaluation(estimate: Estimate) -> str:
    training = max(size for phase, size in estimate.phase_peaks.items() if phase != EVALUATION)
    less = format_bytes(estimate.phase_peaks[EVALUATION] - training)
    return f"sets the peak: training alone allocates {less} less. Fewer sequences at a time (--eval-batch) take less"


def _departures(config: Config) -> str:
    """The method, and what departs from the plain recipe."""
    plain = complete({"method": config["method"]})
    differ = [f"{axis}={value}" for axis, value in config.items if axis != "method" and plain.get(axis) != value]
    return ",".join([f"method={config['method']}", *differ])


def verdict_text(estimate: Estimate) -> str:
    """Whether it fits, where, and what it leaves or lacks."""
    where = f"{'each of ' if estimate.devices > 1 else ''}{devices_text(estimate.hardware, estimate.devices)}"
    needed, limit = format_bytes(estimate.device_bytes), format_bytes(estimate.memory_limit_bytes)
    if not estimate.fits_device:
        excess = format_bytes(-estimate.headroom_bytes)
        return f"{fit_text(estimate)} {where}: needs {needed} of {limit}, {excess} too much"
    return f"{fit_text(estimate)} {where}: {needed} of {limit}, {format_bytes(estimate.headroom_bytes)} to spare"


def fit_text(estimate: Estimate) -> str:
    """Whether it fits, as sure as that is; where only the host's memory is too small, it says so."""
    if estimate.fits_device and not estimate.fits:
        return "does not fit the host's memory"
    unsure = {"likely": ("likely fits", "likely does not fit"), "unsure": ("may fit", "may not fit")}
    fits, does_not_fit = unsure.get(estimate.certainty or "", ("fits", "does not fit"))
    return fits if estimate.fits_device else does_not_fit


def room_text(estimate: Estimate) -> str:
    """What it leaves of the limit, or by how much it exceeds it."""
    room = estimate.headroom_bytes
    return f"{format_bytes(room)} left" if room >= 0 else f"{format_bytes(-room)} over the limit"


def short_text(estimate: Estimate) -> str:
    """By how much it does not fit, be it the device or the host."""
    if estimate.fits_device:
        return f"{format_bytes(estimate.host_short_bytes)} more than the host's memory"
    return room_text(estimate)


def memory_text(estimate: Estimate) -> str:
    """How far predicted memory may be off, and what that is based on."""
    deviation, of = estimate.memory_deviation, f"{estimate.config['method']} trial"
    if estimate.memory_error:
        return f"give or take {estimate.memory_error:.0%} (by formula: the step was not traced)"
    if deviation is None:
        return f"compared with no {of} on {estimate.hardware} yet"
    if not deviation.compared_on:
        return f"give or take {deviation.deviation:.0%} (no {of} on {estimate.hardware} yet)"
    return (
        f"give or take {deviation.deviation:.0%} ({counted(deviation.compared_on, of)} on "
        f"{estimate.hardware} took {math.exp(deviation.mean):.0%} of what was predicted)"
    )


def host_rows(estimate: Estimate) -> list[tuple[str, str]]:
    """What the host has to hold, and whether it can; no row if there is nothing to hold."""
    already_counted = estimate.host_bytes in (0, estimate.device_bytes)  # on a CPU, device memory is host memory
    if already_counted and not estimate.host_short_bytes:
        return []
    needs = format_bytes(estimate.host_bytes)
    if estimate.ranks_per_host > 1:
        needs += f" a rank, {format_bytes(estimate.machine_host_bytes)} a machine"
    if estimate.host_short_bytes and estimate.host_memory_bytes is not None:
        needs += f": does not fit, the machine has {format_bytes(estimate.host_memory_bytes)}"
    return [("host memory", needs)]


def checkpoint_rows(estimate: Estimate) -> list[tuple[str, str]]:
    """What saving a checkpoint needs of the host, where that is more than training does."""
    if not estimate.copied_bytes:
        return []
    if estimate.cannot_save and estimate.host_memory_bytes is not None:
        return [("checkpoint", too_much(estimate.config, estimate.saving_host_bytes, estimate.host_memory_bytes))]
    needs = f"saving one takes {format_bytes(estimate.saving_host_bytes)} of the machine's host memory"
    training = estimate.machine_host_bytes
    return [("checkpoint", f"{needs}; training takes {format_bytes(training) if training else 'none'}")]


def advice_rows(estimate: Estimate, *, of: str = "") -> list[tuple[str, str]]:
    """What would make it fit, or faster, if anything. `of` says which changes were looked at, if not all."""
    if estimate.advice:
        heading = "faster with" if estimate.likely_fits else "fits with"
        changes = {", ".join(change.roles): change for change in estimate.advice}
        return change_rows(heading, changes, estimate.relative_error)
    if estimate.lightest is None:
        return []
    lightest = estimate.lightest.estimate
    needs = format_bytes(lightest.device_bytes)
    if lightest.fits_device and lightest.host_memory_bytes is not None and not lightest.fits:
        sentence = (
            f"no change{of} is enough; the lightest config needs {format_bytes(lightest.machine_host_bytes)} of host "
            f"memory, and the machine has {format_bytes(lightest.host_memory_bytes)}: {short(lightest.config)}"
        )
    elif lightest.fits:
        sentence = f"no small change{of} is enough; {short(lightest.config)} {fit_text(lightest)}, with {needs}"
    else:
        sentence = f"no change{of} is enough; the lightest config needs {needs}"
        sentence += f", which {estimate.lightest.card} has" if estimate.lightest.card is not None else ""
        sentence += f": {short(lightest.config)}"
    return [("to fit", sentence)]


def change_rows(heading: str, changes: Mapping[str, Change], stated: float | None = None) -> list[tuple[str, str]]:
    """The changes by name, under a heading, and how far their speeds may be off where that is more than is `stated`."""
    errors = [round(change.estimate.relative_error or 0.0, 2) for change in changes.values()]
    known = round(stated or 0.0, 2)
    least, rows = max(known, min(errors)), [(heading, "")]
    for (name, change), error in zip(changes.items(), errors, strict=True):
        doubt = f", give or take {error:.0%}" if error > least else ""
        rows.append((f"  {name}", change_text(change) + doubt))
    return [*rows, ("  speeds", f"give or take {least:.0%}")] if least > known else rows


def change_text(change: Change) -> str:
    """A change, its effect on training, and what is predicted with it."""
    values = Config.of(change.values)
    changed = change.estimate
    speed = "" if changed.tokens_per_second is None else f", {total_text(changed.tokens_per_second, changed.devices)}"
    host = f", {format_bytes(changed.machine_host_bytes)} of host memory" if "offload" in change.values else ""
    needed = [package.replace("_", "-") for axis, value, package in PACKAGES if change.values.get(axis) == value]
    needs = f", needs {' and '.join(dict.fromkeys(needed))}" if needed else ""
    return (
        f"{values} ({EFFECTS[change.effect]}): {fit_text(changed)}, {format_bytes(changed.device_bytes)}, "
        f"{room_text(changed)}{host}{speed}{needs}"
    )


def predicted_frontier_text(frontier: PredictedFrontier) -> str:
    """A predicted frontier as `frontier_text` shows a measured one, and what would be recommended."""
    plan, workload = frontier.plan, frontier.plan.job.workload
    heading = frontier_heading("Predicted frontier", plan.job.hardware.name, workload, plan.limits.memory_bytes)
    parts = [f"{heading} (nothing is run):"]
    of_methods = by_method(frontier.points)
    for method in METHODS:
        if method in of_methods:
            parts.append(points_table(of_methods[method], workload.devices, {method: _config_text}))
        elif any(config["method"] == method for config in plan.lattice.configs):
            parts.append(f"No config of {method} is predicted to fit.")
    if not frontier.points:
        parts.append("nothing can be predicted here")
    elif frontier.recommendation is not None:
        parts.append(predicted_choice_text(frontier.recommendation, workload))
    else:
        parts.append(f"No recommendation: {speed_text(frontier.points[0])}")
    borrowed = max((p.borrowed_error for p in frontier.points), default=0.0)
    if borrowed:
        parts.append(f"Of some configs, {of_borrowed(borrowed)}.")
    return "\n\n".join(parts)


def _config_text(estimate: Estimate) -> str:
    fit = fit_text(estimate)
    return short(estimate.config) + ("" if fit == "fits" else f" ({fit})")


def predicted_choice_text(choice: PredictedChoice, workload: Workload) -> str:
    """What would be recommended, its headroom, what it changes about training, and its alternatives."""
    estimate = choice.estimate
    where = devices_text(estimate.hardware, estimate.devices)
    lines = [
        f"Would be recommended for {workload.model}, {step_text(workload)}, on {where}, predicted and not measured:",
        "",
        f"  {estimate.config}",
        "",
        f"  {speed_text(estimate)}",
        f"  {format_bytes(estimate.device_bytes)} of {format_bytes(estimate.memory_limit_bytes)}"
        f"{on_each(workload.devices)}: {fit_text(estimate)}, {format_bytes(estimate.headroom_bytes)} of headroom",
        f"  memory: {memory_text(estimate)}",
    ]
    lines += training_lines(choice.changes_training, workload, estimate.config)
    lines += [alternative_line(a, "" if a.point.fits else short_text(a.point)) for a in choice.alternatives]
    return "\n".join(lines)


def speed_text(estimate: Estimate) -> str:
    """The predicted speed, and how far it may be off."""
    if estimate.tokens_per_second is None or estimate.relative_error is None:
        unknown = f"the speed of {estimate.hardware} is not known"
        return f"speed not predicted: {'the step was not traced' if estimate.memory_error else unknown}"
    basis = "no trial yet" + ("" if estimate.stand_in is None else f": guessed from {estimate.stand_in}")
    basis = counted(estimate.calibrated_on, "trial") if estimate.calibrated_on else basis
    utilisation = "" if estimate.mfu is None else f", MFU {estimate.mfu:.0%}"
    speed = total_text(estimate.tokens_per_second, estimate.devices)
    held_up = "; the host, which launches operations, is what limits it" if estimate.waits_for_launches else ""
    return f"{speed}{utilisation}, give or take {estimate.relative_error:.0%} ({basis}){held_up}"
