"""An explanation of a memory difference, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.cli.output import columns
from autofit.core.units import format_bytes

if TYPE_CHECKING:
    from autofit.operations.explaining import Explanation, Step


def explanation_text(found: Explanation) -> str:
    """Both configs, a table of their memory per device, and what each change contributed to the difference."""
    before, after = found.before, found.after
    rows = [("per device", "first", "second", "difference")]
    rows += [
        (name.replace("_", " "), format_bytes(size), format_bytes(then), signed(then - size))
        for name, size in before.breakdown.items()
        if (then := after.breakdown[name]) or size
    ]
    rows.append(
        (
            "device memory",
            format_bytes(before.device_bytes),
            format_bytes(after.device_bytes),
            signed(found.difference_bytes),
        )
    )
    if before.host_bytes or after.host_bytes:
        host = signed(after.host_bytes - before.host_bytes)
        rows.append(("host memory", format_bytes(before.host_bytes), format_bytes(after.host_bytes), host))
    rows += [
        (
            f"peak in {phase}",
            format_bytes(size),
            format_bytes(after.phase_peaks[phase]),
            signed(after.phase_peaks[phase] - size),
        )
        for phase, size in before.phase_peaks.items()
        if phase in after.phase_peaks  # estimates stored by earlier versions have none of saving
    ]
    if before.step_seconds is not None and after.step_seconds is not None:
        change = f"{after.step_seconds / before.step_seconds - 1:+.0%}"
        rows.append(("step", f"{before.step_seconds:.2f} s", f"{after.step_seconds:.2f} s", change))
    table = columns(rows, right=frozenset({1, 2, 3}))
    said = "\n".join(step_text(step) for step in found.steps) or "the two configs are the same"
    return f"first   {before.config}\nsecond  {after.config}\n\n{table}\n\n{said}"


def step_text(step: Step) -> str:
    """One change: how much it saves, and why."""
    change = ",".join(f"{axis}={'-' if value is None else value}" for axis, value in step.change.items())
    said = f"{change} {'saves' if step.saved_bytes >= 0 else 'costs'} {format_bytes(abs(step.saved_bytes))}"
    return "\n  ".join([said, *step.reasons])


def signed(size: int) -> str:
    return f"{'+' if size > 0 else '-' if size < 0 else ''}{format_bytes(abs(size))}"
