"""What is predicted, as text for people: estimates, advice, frontiers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autofit.cli.output import columns
from autofit.cli.text.phrases import (
    EFFECTS,
    SAME_TRAINING,
    devices_text,
    on_each,
    padding_text,
    points_table,
    several_text,
    step_text,
    total_text,
)
from autofit.core.lattice import Config
from autofit.core.outcome import EVALUATION
from autofit.core.units import format_bytes, format_duration
from autofit.core.workload import METHODS, Workload
from autofit.estimate.assumptions import of_borrowed
from autofit.estimate.estimate import Change, Estimate
from autofit.techniques import complete
from autofit.techniques.short_text import short

if TYPE_CHECKING:
    from autofit.operations.sequence_length import Longest
    from autofit.prediction.predicted_frontier import PredictedChoice, PredictedFrontier


def estimate_text(found: Estimate, *, verbose: bool = False) -> str:
    """An estimate as text for people, the verdict first; `verbose` adds the allocator's figures and what is assumed."""
    share = {name: f"{format_bytes(size)} ({size / found.device_bytes:.0%})" for name, size in found.breakdown.items()}
    rows = [
        ("config", _departures(found.config)),
        ("memory", f"{format_bytes(found.device_bytes)} at the peak{on_each(found.devices)}, {memory_text(found)}"),
        *((f"  {name.replace('_', ' ')}", share[name]) for name, size in found.breakdown.items() if size),
        *host_rows(found),
        *checkpoint_rows(found),
        *([("close", CLOSE)] if found.gives_back_cache else []),
        *([("evaluation", _in_evaluation(found))] if found.peak_phase == EVALUATION else []),
        *(_details(found) if verbose else ()),
        *advice_rows(found),
    ]
    return f"{verdict_text(found)}\n{speed_text(found)}\n\n{columns(rows)}"


def longest_text(found: Longest, *, verbose: bool = False) -> str:
    """How long sequences may be, then the estimate of those."""
    length, where = f"{found.seq_len:,} tokens", several_text(found.estimate.hardware, found.estimate.devices)
    if not found.estimate.likely_fits:
        said = f"not even sequences of {length} are sure to fit {where}"
    elif found.seq_len == found.most:
        said = f"{length} fit, and none are longer"
    else:
        said = f"{length} are the longest sequences that fit {where} with room for the error"
    return f"{said}\n\n{estimate_text(found.estimate, verbose=verbose)}"


CLOSE = "fits only as the allocator gives unused memory back, which slows steps down"


def _in_evaluation(found: Estimate) -> str:
    training = max(size for phase, size in found.phase_peaks.items() if phase != EVALUATION)
    less = format_bytes(found.phase_peaks[EVALUATION] - training)
    return f"sets the peak: training alone allocates {less} less. Fewer sequences at a time (--eval-batch) take less"


def _details(found: Estimate) -> list[tuple[str, str]]:
    return [
        ("allocated", format_bytes(found.peak_allocated_bytes)),
        ("reserved", format_bytes(found.peak_reserved_bytes)),
        ("by phase", ", ".join(f"{k} {format_bytes(v)}" for k, v in found.phase_peaks.items())),
        *(("assumed", sentence) for sentence in found.assumptions),
        ("estimated in", format_duration(found.seconds_to_estimate)),
    ]


def _departures(config: Config) -> str:
    """The method, and what departs from the plain recipe."""
    plain = complete({"method": config["method"]})
    differ = [f"{axis}={value}" for axis, value in config.items if axis != "method" and plain.get(axis) != value]
    return ",".join([f"method={config['method']}", *differ])


def verdict_text(found: Estimate) -> str:
    """Whether it fits, where, and what it leaves or lacks."""
    where = f"{'each of ' if found.devices > 1 else ''}{several_text(found.hardware, found.devices)}"
    needed, limit = format_bytes(found.device_bytes), format_bytes(found.memory_limit_bytes)
    if not found.fits_device:
        return f"{fit_text(found)} {where}: needs {needed} of {limit}, {format_bytes(-found.headroom_bytes)} too much"
    return f"{fit_text(found)} {where}: {needed} of {limit}, {format_bytes(found.headroom_bytes)} to spare"


def fit_text(found: Estimate) -> str:
    """Whether it fits, as sure as that is; where only the host's memory is too small, it says so."""
    if found.fits_device and not found.fits:
        return "does not fit the host's memory"
    said = {
        "likely": ("likely fits", "likely does not fit"),
        "unsure": ("may fit", "may not fit"),
    }.get(found.certainty or "", ("fits", "does not fit"))
    return said[0] if found.fits_device else said[1]


def room_text(found: Estimate) -> str:
    """What it leaves of the limit, or by how much it exceeds it."""
    room = found.headroom_bytes
    return f"{format_bytes(room)} left" if room >= 0 else f"{format_bytes(-room)} over the limit"


def short_text(found: Estimate) -> str:
    """By how much it does not fit: what the host lacks if the device has room, else what is over the limit."""
    if found.fits_device:
        return f"{format_bytes(found.host_short_bytes)} more than the host's memory"
    return room_text(found)


def memory_text(found: Estimate) -> str:
    """How far predicted memory may be off, and what that is based on."""
    shown, of = found.memory_deviation, f"{found.config['method']} trial"
    if found.memory_error:
        return f"give or take {found.memory_error:.0%} (by formula: the step was not traced)"
    if shown is None:
        return f"compared with no {of} on {found.hardware} yet"
    if not shown.compared_on:
        return f"give or take {shown.deviation:.0%} (no {of} on {found.hardware} yet)"
    return (
        f"give or take {shown.deviation:.0%} ({shown.compared_on} {of}{'s' * (shown.compared_on > 1)} on "
        f"{found.hardware} took {math.exp(shown.mean):.0%} of what was predicted)"
    )


def host_rows(found: Estimate) -> list[tuple[str, str]]:
    """What the host has to hold, and whether it can; no row if there is nothing to hold."""
    own = found.host_bytes in (0, found.device_bytes)  # on a CPU, device memory is host memory
    if own and not found.host_short_bytes:
        return []
    said = format_bytes(found.host_bytes)
    if found.ranks_per_host > 1:
        said += f" a rank, {format_bytes(found.machine_host_bytes)} a machine"
    if found.host_short_bytes and found.host_memory_bytes is not None:
        said += f": does not fit, the machine has {format_bytes(found.host_memory_bytes)}"
    return [("host memory", said)]


def checkpoint_rows(found: Estimate) -> list[tuple[str, str]]:
    """What saving a checkpoint needs of the host, where that is more than training does."""
    if not found.copied_bytes:
        return []
    said = f"saving one takes {format_bytes(found.saving_host_bytes)} of the machine's host memory"
    if found.cannot_save and found.host_memory_bytes is not None:
        in_shards = str(found.config.get("sharding")).startswith("fsdp")
        instead = ": set state_dict_type: SHARDED_STATE_DICT" if in_shards else ""
        return [("checkpoint", f"{said}: does not fit, it has {format_bytes(found.host_memory_bytes)}{instead}")]
    there = found.machine_host_bytes
    return [("checkpoint", f"{said}; training takes {format_bytes(there) if there else 'none'}")]


def advice_rows(found: Estimate) -> list[tuple[str, str]]:
    """What would make it fit, or make it faster; no row if no such change is known."""
    if found.advice:
        heading = "faster with" if found.likely_fits else "fits with"
        return [(heading, ""), *((f"  {', '.join(change.roles)}", change_text(change)) for change in found.advice)]
    if found.lightest is None:
        return []
    light = found.lightest.estimate
    needs = format_bytes(light.device_bytes)
    if light.fits_device and light.host_memory_bytes is not None and not light.fits:
        said = (
            f"no change is enough; the lightest config needs {format_bytes(light.machine_host_bytes)} of host memory, "
            f"and the machine has {format_bytes(light.host_memory_bytes)}: {short(light.config)}"
        )
    elif light.fits:
        said = f"no small change is enough; {short(light.config)} {fit_text(light)}, with {needs}"
    else:
        said = f"no change is enough; the lightest config needs {needs}"
        said += f", which {found.lightest.card} has" if found.lightest.card is not None else ""
        said += f": {short(light.config)}"
    return [("to fit", said)]


def change_text(change: Change) -> str:
    """A change, its effect on training, and what is predicted with it."""
    values = Config.of(change.values)
    then = change.estimate
    speed = "" if then.tokens_per_second is None else f", {total_text(then.tokens_per_second, then.devices)}"
    host = f", {format_bytes(then.machine_host_bytes)} of host memory" if "offload" in change.values else ""
    return (
        f"{values} ({EFFECTS[change.effect]}): {fit_text(then)}, {format_bytes(then.device_bytes)}, "
        f"{room_text(then)}{host}{speed}"
    )


def predicted_frontier_text(found: PredictedFrontier) -> str:
    """A predicted frontier, with one table per method, and what would be recommended.

    With several devices, memory is per device, and speed is given both in total and per device.
    """
    workload, hardware = found.plan.job.workload, found.plan.job.hardware
    parts = [f"Predicted frontier of {devices_text(hardware, workload)} for {workload.model} (nothing is run):"]
    for method in METHODS:
        points = found.of(method)
        if points:
            parts.append(_predicted_table(method, points, workload.devices))
        elif any(config["method"] == method for config in found.plan.lattice.configs):
            parts.append(f"No config of {method} is predicted to fit.")
    if not found.points:
        parts.append("nothing can be predicted here")
    elif found.recommendation is not None:
        parts.append(predicted_choice_text(found.recommendation, workload))
    else:
        parts.append(f"No recommendation: {speed_text(found.points[0])}")
    borrowed = max((p.borrowed_error for p in found.points), default=0.0)
    if borrowed:
        parts.append(f"Of some configs, {of_borrowed(borrowed)}.")
    return "\n\n".join(parts)


def _predicted_table(method: str, points: Iterable[Estimate], devices: int) -> str:
    rows = []
    for point in points:
        sure = fit_text(point)
        config = short(point.config) + ("" if sure == "fits" else f" ({sure})")
        rows.append((point.device_bytes, point.tokens_per_second, (config,)))
    return points_table(rows, devices, (method,))


def predicted_choice_text(choice: PredictedChoice, workload: Workload) -> str:
    """What would be recommended, its headroom, what it changes about training, and its alternatives."""
    found = choice.estimate
    where = several_text(found.hardware, found.devices)
    lines = [
        f"Would be recommended for {workload.model}, {step_text(workload)}, on {where}, predicted and not measured:",
        "",
        f"  {found.config}",
        "",
        f"  {speed_text(found)}",
        f"  {format_bytes(found.device_bytes)} of {format_bytes(found.memory_limit_bytes)}"
        f"{on_each(workload.devices)}: {fit_text(found)}, {format_bytes(found.headroom_bytes)} of headroom",
        f"  memory: {memory_text(found)}",
    ]
    padding = padding_text(workload, found.config)
    lines += [f"  {sentence}" for sentence in (*(choice.changes_training or (SAME_TRAINING,)), padding) if sentence]
    for beside in choice.alternatives:
        other = beside.point
        over = "" if other.fits else f", {short_text(other)}"
        speed = "?" if other.tokens_per_second is None else f"{other.tokens_per_second:,.0f}"
        lines.append(
            f"  {beside.role}: {speed} tokens/s ({beside.speedup:.2f}x), "
            f"{format_bytes(other.device_bytes)}{over}: {short(other.config)}"
        )
    return "\n".join(lines)


def speed_text(found: Estimate) -> str:
    """The predicted speed, and how far it may be off."""
    if found.tokens_per_second is None or found.relative_error is None:
        reason = "the step was not traced" if found.memory_error else f"the speed of {found.hardware} is not known"
        return f"speed not predicted: {reason}"
    basis = (
        f"{found.calibrated_on} trial{'s' * (found.calibrated_on > 1)}"
        if found.calibrated_on
        else f"no trial yet{'' if found.stand_in is None else f': guessed from {found.stand_in}'}"
    )
    utilisation = "" if found.mfu is None else f", MFU {found.mfu:.0%}"
    speed = total_text(found.tokens_per_second, found.devices)
    held_up = "; the host, which launches operations, is what limits it" if found.waits_for_launches else ""
    return f"{speed}{utilisation}, give or take {found.relative_error:.0%} ({basis}){held_up}"
