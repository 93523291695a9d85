"""What was measured, as text for people: frontiers, recommendations, trials."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from autofit.cli.output import columns
from autofit.cli.text.phrases import (
    EMULATED,
    alternative_line,
    devices_text,
    frontier_heading,
    on_each,
    points_table,
    step_text,
    total_text,
    training_lines,
)
from autofit.core.frontier import Frontier, Point, Recommendation, by_method
from autofit.core.outcome import Fits, Outcome, TimedOut, Trial
from autofit.core.units import counted, format_bytes, format_duration
from autofit.planning.requests import memory_limit
from autofit.techniques.short_text import short

IN_DOUBT = "in doubt: the device was busy, throttled or held back while it was timed"


def spread_text(spread: float | None) -> str:
    """A relative spread as text; that of a single repeat is unknown."""
    return "unknown" if spread is None else f"{spread:.1%}"


def frontier_text(frontier: Frontier, *, memory_limit_bytes: int | None = None) -> str:
    """What the frontier is of; then its points, lightest first, a table per method. Those over the limit are marked."""
    workload = frontier.workload
    limit = memory_limit(memory_limit_bytes, frontier.hardware, workload.devices)

    def config(point: Point) -> str:
        is_over = point.device_bytes > limit
        return short(point.config) + " (over the limit)" * is_over + " (in doubt)" * point.in_doubt

    tables = [
        points_table(points, workload.devices, {"spread": lambda p: spread_text(p.relative_spread), method: config})
        for method, points in by_method(frontier.points).items()
    ]
    heading = frontier_heading("Frontier", frontier.hardware.name, workload, limit)
    remarks = [EMULATED] if frontier.hardware.is_emulated else []
    remarks += [IN_DOUBT] if any(point.in_doubt for point in frontier.points) else []
    return "\n\n".join([f"{heading}:", *(tables or ["nothing that was measured fits"]), *remarks])


def recommendation_text(answer: Recommendation, remarks: Sequence[str] = ()) -> str:
    """The recommendation, its headroom, `remarks`, what it changes about training, and its alternatives."""
    m = answer.point.measurement
    lines = [
        f"Recommended for {answer.workload.model}, {step_text(answer.workload)}, on "
        f"{devices_text(answer.hardware.name, answer.workload.devices)}:",
        "",
        f"  {answer.point.config}",
        "",
        f"  {total_text(m.tokens_per_second, answer.workload.devices)}, {m.step_seconds.median:.2f} s a step "
        f"(spread {spread_text(answer.point.relative_spread)} over {counted(m.steps, 'repeat')}"
        f"{' and between runs' if answer.point.between else ''}), "
        f"{answer.provenance}, {'verified by a second run' if answer.verified else 'one run'}",
        f"  {format_bytes(m.device_bytes)} of {format_bytes(answer.memory_limit_bytes)}"
        f"{on_each(answer.workload.devices)}: {format_bytes(answer.headroom_bytes)} of headroom",
    ]
    doubts, emulated = [IN_DOUBT] * answer.point.in_doubt, [EMULATED] * answer.hardware.is_emulated
    lines += [f"  {remark}" for remark in (*doubts, *remarks, *emulated)]
    if m.leak_bytes_per_step:
        lines.append(f"  warning: memory grew by about {format_bytes(m.leak_bytes_per_step)} a step")
    lines += training_lines(answer.changes_training, answer.workload, answer.point.config)
    for alternative in answer.alternatives:
        over = alternative.over_limit_bytes
        lines.append(alternative_line(alternative, f"{format_bytes(over)} over the limit" if over > 0 else ""))
    return "\n".join(lines)


def trial_text(trial: Trial) -> str:
    devices = trial.workload.devices
    head = f"{trial.config}\n" + (f"on {devices_text(trial.hardware.name, devices)}\n" if devices > 1 else "")
    if not isinstance(trial.outcome, Fits):
        lines = [f"{trial.outcome.kind.replace('_', ' ')}: {trial.outcome.reason}", *_so_far(trial.outcome)]
        tail = getattr(trial.outcome, "stderr_tail", "")
        return head + "\n".join(lines + ([tail] if tail else []))
    m = trial.outcome.measurement
    rows = [
        ("speed", total_text(m.tokens_per_second, devices, decimals=1)),
        ("step", f"{m.step_seconds.median:.3f} s median, {m.step_seconds.p95:.3f} s p95, {counted(m.steps, 'repeat')}"),
        ("spread", spread_text(m.step_seconds.relative_spread)),
        ("MFU", "unknown peak" if m.mfu is None else f"{m.mfu:.1%}"),
        ("device memory", format_bytes(m.device_bytes) + (" on the fullest" if devices > 1 else "")),
        ("allocated", format_bytes(m.peak_allocated_bytes)),
        ("reserved", format_bytes(m.peak_reserved_bytes)),
        ("by phase", ", ".join(f"{k} {format_bytes(v)}" for k, v in m.phase_peaks.items())),
        ("host", f"{format_bytes(m.host_peak_bytes)}, of which {format_bytes(m.host_baseline_bytes)} before the trial"),
        ("loss", f"{m.losses[0]:.4f} -> {m.losses[-1]:.4f} over {len(m.losses)} steps" if m.losses else "not reported"),
        ("gradient", "not compared" if m.plain_gradient_norm is None else "agrees with plain training's"),
        ("set-up", format_duration(m.setup_seconds)),
    ]
    rows += [
        (f"rank {rank.rank}", f"{format_bytes(rank.device_bytes)}, {rank.step_seconds:.3f} s a step")
        for rank in m.ranks
    ]
    if m.leak_bytes_per_step:
        rows.append(("leak", f"about {format_bytes(m.leak_bytes_per_step)} more with each step"))
    if trial.hardware.is_emulated:
        rows.append(("note", EMULATED))
    if trial.doubts:
        rows.append(("in doubt", "; ".join(trial.doubts)))
    return head + columns([("outcome", "fits"), *rows])


def _so_far(outcome: Outcome) -> list[str]:
    if not isinstance(outcome, TimedOut):
        return []
    lines = [] if outcome.peak_bytes is None else [f"memory so far: {format_bytes(outcome.peak_bytes)}"]
    if outcome.timed_seconds:
        lines.append(f"step: {median(outcome.timed_seconds):.3f} s, {len(outcome.timed_seconds)} timed so far")
    elif outcome.least_step_seconds is not None:
        lines.append(f"a step takes at least {format_duration(outcome.least_step_seconds)}")
    return lines
