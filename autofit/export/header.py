"""The comment at the top of an exported file: where its numbers come from."""

from __future__ import annotations

from collections.abc import Iterable

from autofit.export.document import Task
from autofit.frontier import Recommendation
from autofit.units import format_bytes


def header(task: Task, *, needs: str, launch: str, notes: Iterable[str]) -> str:
    """Comment lines (`# ...`) that say what was measured, where, and what the file cannot express."""
    recommendation, workload = task.recommendation, task.workload
    hardware = recommendation.hardware
    rows = [
        ("Model", f"{workload.model}, loaded from {task.source}"),
        ("Workload", _workload(recommendation)),
        ("Config", str(recommendation.point.config)),
        (recommendation.provenance.capitalize(), _measurement(recommendation)),
        ("Hardware", f"{hardware.name} ({hardware.device_name}, {format_bytes(hardware.memory_bytes)})"),
        ("Stack", ", ".join(f"{k} {v}" for k, v in recommendation.stack.to_json().items() if v)),
        ("Needs", needs),
        ("Launch", launch),
        *(("Changes", change) for change in recommendation.changes_training),
        *(("Differs", note) for note in notes),
    ]
    lines = ["Written by autofit. Data, learning rate and schedule are yours; they do not change memory or speed."]
    lines += [f"{name + ':':<10} {_printable(text)}" for name, text in rows]
    return "".join(f"# {line}\n" for line in lines)


def _workload(recommendation: Recommendation) -> str:
    workload = recommendation.workload
    devices = "1 device" if workload.devices == 1 else f"{workload.devices} devices"
    return f"{workload.global_batch} sequences of {workload.seq_len} tokens per optimizer step, on {devices}"


def _measurement(recommendation: Recommendation) -> str:
    point = recommendation.point
    measured = point.measurement
    trial = "" if point.trial_id is None else f", trial {point.trial_id}"
    return (
        f"{measured.tokens_per_second:,.0f} tokens/s, {measured.step_seconds.median:.3g} s a step, "
        f"{format_bytes(measured.device_bytes)} of device memory "
        f"({format_bytes(recommendation.headroom_bytes)} below the limit of "
        f"{format_bytes(recommendation.memory_limit_bytes)}){trial}"
    )


def _printable(text: str) -> str:
    """`text` on one line, so that an untrusted name cannot break out of the comment."""
    return "".join(character if character.isprintable() else " " for character in text)
